"""fullstride: a step costs what the hardware charges."""

from fullstride.import_advice import install

__version__ = "0.1.0"
install()
del install
