"""Description of a model family: what its files call things, and which values of theirs this encoder computes with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.

    Attributes:
        prefix: beginning of the encoder's names in a file that has heads, too.
        head: beginnings of names that only a file with the masked language model's head has.
        architectures: transformers' classes with that head, and of the encoder alone.
        names: parts of the model outside its layers, by where `Bert` has them.
        tied: copies that a file may hold of other tensors, and those.
        layers: beginning of a layer's names, before its number.
        layer: parts of a layer.
        fields: fields of `BertConfig` by their names in `config.json`, the six sizes first.
        fixed: values of `config.json` that the encoder computes with, the default first; a file may leave them out.
        defaults: fields of `BertConfig` that differ from BERT's where a file leaves them out.
        rewritten: function from the entries of `config.json` to those that `fields` and `fixed` know.
        pads_positions: whether the position table begins with the rows up to the padding token's number.

    """

    prefix: str
    head: tuple[str, ...]
    architectures: tuple[str, str]
    names: Mapping[str, str]
    tied: Mapping[str, str]
    layers: str
    layer: Mapping[str, str]
    fields: Mapping[str, str]
    fixed: Mapping[str, tuple[Any, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rewritten: Callable[[dict[str, Any]], dict[str, Any]] = dict
    pads_positions: bool = False

    def parts(self, layers: int) -> dict[str, str]:
        """Names in a file of all parts of a model with so many layers."""
        inner = {
            f".layers[{i}].{ours}": f"{self.layers}{i}.{theirs}"
            for i in range(layers)
            for ours, theirs in self.layer.items()
        }
        return {**self.names, **inner}
