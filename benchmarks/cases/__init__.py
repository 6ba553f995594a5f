"""Measured cases, a folder for each area."""
