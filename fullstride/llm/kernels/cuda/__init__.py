"""Kernels in CUDA C++ for Hopper GPUs: compiled by NVRTC when they are first traced, launched by JAX."""
