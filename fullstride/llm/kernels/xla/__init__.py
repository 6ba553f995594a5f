"""Kernel set of plain JAX operations."""
