"""Searches for the parameters of kernels, and smaller measurements."""
