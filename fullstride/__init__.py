"""fullstride: a step costs what the hardware charges."""

__version__ = "0.1.0"
