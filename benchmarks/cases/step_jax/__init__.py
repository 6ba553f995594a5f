"""Ways to call a training step in JAX."""
