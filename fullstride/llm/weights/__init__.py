"""Loading of a model's configuration, parameters and tokenizer from a file, a folder or a name."""

from fullstride.llm.weights.loading import LoadedModel, load
from fullstride.llm.weights.parameters import Parameters

__all__ = ["LoadedModel", "Parameters", "load"]
