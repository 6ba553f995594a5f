"""Kernels in plain JAX."""
