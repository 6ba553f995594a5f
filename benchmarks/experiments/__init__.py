"""Experiments over several seeds."""
