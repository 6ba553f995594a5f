"""Scores of samples."""
