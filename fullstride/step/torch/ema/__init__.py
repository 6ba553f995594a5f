"""Exponential moving averages of weights."""
