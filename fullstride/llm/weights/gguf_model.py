"""A GGUF file as a configuration, canonical parameters and a tokenizer."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fullstride.errors import ConfigError, in_a_line
from fullstride.llm.config import ModelConfig
from fullstride.llm.families import FAMILIES
from fullstride.llm.text.gguf_tokenizer import read_tokenizer
from fullstride.llm.text.tokenizer import Tokenizer
from fullstride.llm.weights import suggested
from fullstride.llm.weights.canonical import canonical, in_order
from fullstride.llm.weights.dequantize import dequantize
from fullstride.llm.weights.gguf_config import FREQUENCIES, read_config
from fullstride.llm.weights.gguf_file import Packed, open_gguf
from fullstride.llm.weights.parameters import Stored, Values

OUTER = {"token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "head"}
INNER = {
    "attn_norm.weight": "attn_norm",
    "ffn_norm.weight": "mlp_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
}
LAYERS = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class PackedRows(Stored):
    """A tensor of a GGUF, unpacked where it is read.

    Attributes:
        order: for each row the row of the file that holds it; None where they are the same.

    """

    packed: Packed
    order: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return self.packed.shape

    @property
    def kind(self) -> str:
        """How its numbers are packed."""
        return self.packed.kind.name

    def read(self, rows: slice, columns: slice, dtype: np.dtype) -> Values:
        """A part; of packed columns only the blocks that hold it are unpacked."""
        kind, data = self.packed.kind, self.packed.data
        if len(self.shape) == 1:
            return dequantize(kind, data, dtype)[0, rows]
        data = data[rows] if self.order is None else data[self.order[rows]]
        first, last = columns.start // kind.numbers, -(-columns.stop // kind.numbers)
        part = dequantize(kind, data[:, first * kind.size : last * kind.size], dtype)
        skipped = first * kind.numbers
        return part[:, columns.start - skipped : columns.stop - skipped]


def load_gguf(path: Path) -> tuple[ModelConfig, dict[str, Stored], Tokenizer, dict[str, int | float]]:
    """A GGUF's configuration, mapped parameters, tokenizer and suggested sampling.

    Raises:
        ConfigError: if it is damaged, or of a model that the engine does not run.

    """
    try:
        return _loaded(path)
    except ConfigError as error:
        # Names and values are the file's own, and may have line ends.
        raise ConfigError(in_a_line(error)) from error


def _loaded(path: Path) -> tuple[ModelConfig, dict[str, Stored], Tokenizer, dict[str, int | float]]:
    file = open_gguf(path)
    config = read_config(file)
    family = FAMILIES[config.architecture]
    inner = {**INNER, **family.gguf_tensors}
    found: dict[str, Stored] = {}
    for name, packed in file.tensors.items():
        ours = canonical(name, LAYERS, inner, OUTER)
        if name != FREQUENCIES:
            found[ours] = PackedRows(
                packed, _order(ours, packed.shape, config.head_dim) if family.interleaved else None
            )
    stored, tokenizer = in_order(path, config, found), read_tokenizer(path, file.metadata)
    return config, stored, tokenizer, suggested.of_gguf(path, file.metadata)


def _order(name: str, shape: tuple[int, ...], head_dim: int) -> np.ndarray | None:
    """llama.cpp rotates neighbours in some families' heads, so there the two halves of a head lie interleaved."""
    if not name.endswith((".q", ".k")) or shape[0] % head_dim:
        return None
    rows = np.arange(shape[0]).reshape(-1, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
