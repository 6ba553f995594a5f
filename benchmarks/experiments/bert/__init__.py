"""Masked language modelling with and without dispatch costs."""
