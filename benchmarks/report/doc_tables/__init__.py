"""Tables of results in the README and the documentation, written by `python -m benchmarks report readme`."""
