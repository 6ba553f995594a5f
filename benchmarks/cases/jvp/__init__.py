"""Attention and norms with forward-mode derivatives."""
