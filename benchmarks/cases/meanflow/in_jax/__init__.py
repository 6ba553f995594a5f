"""MeanFlow's step in JAX, with PyTorch's weights: the U-Net, the DiT, the loss, and a step to be timed."""
