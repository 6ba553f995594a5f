"""What benchmarks share: budget, results, tables, provenance, statistics over seeds."""
