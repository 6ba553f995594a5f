"""Trackers: a run's numbers in dashboards, next to metrics.jsonl, which stays the complete record."""
