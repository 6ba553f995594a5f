"""BERT's training step."""
