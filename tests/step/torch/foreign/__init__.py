"""Training of models and by optimizers that nobody here wrote."""
