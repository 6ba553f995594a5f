"""From a file, a folder or a name to a model's configuration, parameters and tokenizer."""

from fullstride.llm.weights.loading import LoadedModel, load
from fullstride.llm.weights.parameters import Parameters

__all__ = ["LoadedModel", "Parameters", "load"]
