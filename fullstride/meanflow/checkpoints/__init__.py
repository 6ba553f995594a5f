"""Checkpoints: format and folder."""
