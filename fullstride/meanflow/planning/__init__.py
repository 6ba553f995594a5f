"""Predicted cost of a run, from counted work and the rates that measured steps reached."""
