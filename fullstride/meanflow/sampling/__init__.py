"""Samples of trained networks."""
