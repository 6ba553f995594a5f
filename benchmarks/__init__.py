"""Benchmarks, experiments and reports of fullstride: `python -m benchmarks --help`."""
