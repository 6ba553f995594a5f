"""Copies between host and device that nobody waits for."""
