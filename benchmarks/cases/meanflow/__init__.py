"""MeanFlow's training step, sampling, loading and scaling."""
