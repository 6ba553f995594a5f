"""Data sets and models by name: registry, download, cache."""
