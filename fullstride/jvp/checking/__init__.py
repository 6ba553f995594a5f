"""Tangents checked against fp64 and finite differences."""
