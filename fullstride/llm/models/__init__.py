"""Decoder-only transformers over a flat list of parameters."""
