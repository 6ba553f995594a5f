"""Heads of a fine-tune, which the encoder does not compute with: kept as they are, and written back."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Array
from safetensors.flax import load, save


@dataclass(frozen=True)
class Heads:
    """Tensors of other heads, such as a classifier's, and what `config.json` says of them.

    Equal bytes are equal heads, so that a model can hold them outside its arrays: no optimizer changes them.

    Attributes:
        stored: a safetensors file.

    """

    stored: bytes = field(repr=False)

    @classmethod
    def of(cls, arrays: Mapping[str, Array], settings: Mapping[str, Any]) -> "Heads":
        """Keep arrays by their names in a file, with entries of `config.json`."""
        return cls(save(dict(arrays), {"settings": json.dumps(settings)}))

    @property
    def arrays(self) -> dict[str, Array]:
        """Tensors by their names in a file."""
        return load(self.stored)

    @property
    def settings(self) -> dict[str, Any]:
        """Entries of `config.json`."""
        header = json.loads(self.stored[8 : 8 + int.from_bytes(self.stored[:8], "little")])
        return json.loads(header["__metadata__"]["settings"])
