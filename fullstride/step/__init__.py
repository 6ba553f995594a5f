"""Training steps that are built once and replayed."""
