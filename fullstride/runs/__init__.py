"""A run's folder: lock, metrics log, early ends, workload; atomic files."""
