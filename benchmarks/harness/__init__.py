"""Shared parts of the benchmarks: budget, results, tables, provenance, statistics over seeds."""
