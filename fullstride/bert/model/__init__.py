"""The encoder, its heads and weights."""
