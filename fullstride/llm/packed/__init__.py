"""Weights as codes of a few bits with scales: formats, arrays on the device, and their making from numbers."""
