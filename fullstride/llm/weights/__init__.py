"""From a file, a folder or a name to a model's configuration, parameters and tokenizer."""

from fullstride.llm.weights.loading import Loaded, load
from fullstride.llm.weights.parameters import Parameters

__all__ = ["Loaded", "Parameters", "load"]
