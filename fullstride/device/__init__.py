"""Devices: choice, precision, memory, CUDA graphs, compilation of Triton kernels."""
