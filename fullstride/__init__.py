"""fullstride: a step costs what the hardware charges."""

from fullstride import import_advice, renamed

__version__ = "0.1.0"
import_advice.install()
renamed.install()
del import_advice, renamed
