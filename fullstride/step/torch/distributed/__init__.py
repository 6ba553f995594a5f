"""Gradients over several processes."""
