"""Measurement of a step: timing, FLOPs, roofline bound, environment."""
