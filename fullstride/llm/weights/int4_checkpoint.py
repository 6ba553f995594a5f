"""4-bit matrices of AWQ (arXiv:2306.00978) and GPTQ (arXiv:2210.17323) checkpoints: codes, codes of zero and scales."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float16, Int32, UInt8

from fullstride.errors import ConfigError
from fullstride.llm.packed.formats import INT4_GROUPS, CodedRows
from fullstride.llm.weights.parameters import StoredParameter, Values
from fullstride.llm.weights.safetensors_file import MappedTensor
from fullstride.llm.weights.settings import shortened

AWQ, GPTQ, GPTQ_2 = "awq", "gptq", "gptq_v2"
# What other values would change the arithmetic: a key, and what it may be.
FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    AWQ: {"bits": (4,), "group_size": INT4_GROUPS, "version": ("gemm", None), "zero_point": (True, None)},
    GPTQ: {
        "bits": (4,),
        "group_size": INT4_GROUPS,
        "desc_act": (False, None),
        "checkpoint_format": (GPTQ, GPTQ_2, None),
        "dynamic": (None,),
    },
}
# Codes of a word, and the output of eight that each half byte of an AWQ word is.
PACK = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
QWEIGHT, QZEROS, SCALES, INDEX = ".qweight", ".qzeros", ".scales", ".g_idx"


class Int4Settings(NamedTuple):
    """Layout of a checkpoint's 4-bit matrices, and numbers in a group."""

    layout: str
    group: int


def int4_settings(file: Path, raw: Mapping[str, Any]) -> Int4Settings | None:
    """Return how a config.json says that matrices are packed; None if not as AWQ or GPTQ.

    Raises:
        ConfigError: for bits, groups or an order of inputs that are not supported.

    """
    own = raw.get("quantization_config")
    method = own.get("quant_method") if isinstance(own, dict) else None
    if not isinstance(own, dict) or method not in FIXED:
        return None
    for key, allowed in FIXED[method].items():
        value = own[key].lower() if isinstance(own.get(key), str) else own.get(key)
        if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
            expected = " or ".join("absent" if each is None else str(each) for each in allowed)
            raise ConfigError(f"{file}: quantization_config={shortened(own)}: {key} is {value}: expected {expected}")
    return Int4Settings(own.get("checkpoint_format") or method, own["group_size"])


@dataclass(frozen=True)
class Int4Matrix:
    """Matrix of 4-bit codes, eight in a word; inputs of a group share a scale and a code of zero.

    Attributes:
        name: name in the file, for messages.
        layout: `awq` has words of eight outputs, and `gptq` of eight inputs.
        group: inputs of a group.
        words: codes.
        zeros: codes of zero, in words of eight outputs; `gptq` has one less than they are.
        scales: scales.

    """

    name: str
    layout: str
    group: int
    words: Int32[np.ndarray, "first second"]
    zeros: Int32[np.ndarray, "groups eighths"]
    scales: Float16[np.ndarray, "groups out"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs."""
        return self.scales.shape[1], self.scales.shape[0] * self.group

    @property
    def kind(self) -> str:
        """Name of the packed format."""
        return f"int4_{self.group}"

    def codes(self, rows: slice, columns: slice) -> CodedRows:
        """A part as codes.

        Raises:
            ConfigError: if the columns begin or end within a group, or a code of zero may be either 0 or 16.

        """
        if columns.start % self.group or columns.stop % self.group:
            raise ConfigError(f"inputs {columns.start} to {columns.stop} are not whole groups of {self.group}")
        groups = slice(columns.start // self.group, columns.stop // self.group)
        records = np.stack([self.scales[groups, rows], self._zeros(groups, rows)], axis=-1)
        found = np.ascontiguousarray(records.swapaxes(0, 1)).view(np.uint8)
        return CodedRows(self.kind, self._codes(rows, columns), found)

    def read(self, rows: slice, columns: slice, dtype: np.dtype) -> Values:
        """A part as numbers; of inputs the groups that hold it are unpacked."""
        first, last = columns.start // self.group, -(-columns.stop // self.group)
        whole = slice(first * self.group, last * self.group)
        codes = self._codes(rows, whole).astype(np.float32).reshape(-1, last - first, self.group)
        groups = slice(first, last)
        zeros, scales = (
            x.astype(np.float32).T[..., None] for x in (self._zeros(groups, rows), self.scales[groups, rows])
        )
        values = ((codes - zeros) * scales).reshape(len(codes), -1)
        return values[:, columns.start - whole.start : columns.stop - whole.start].astype(dtype)

    def _codes(self, rows: slice, columns: slice) -> UInt8[np.ndarray, "rows columns"]:
        if self.layout == AWQ:
            return np.ascontiguousarray(_outputs(self.words[columns], rows, AWQ_ORDER).T)
        first, last = columns.start // PACK, -(-columns.stop // PACK)
        part = _halves(np.ascontiguousarray(self.words[first:last, rows].T)).reshape(-1, (last - first) * PACK)
        return part[:, columns.start - first * PACK : columns.stop - first * PACK]

    def _zeros(self, groups: slice, rows: slice) -> Float16[np.ndarray, "groups rows"]:
        found = _outputs(self.zeros[groups], rows, AWQ_ORDER if self.layout == AWQ else tuple(range(PACK)))
        if self.layout == GPTQ:
            if (found == 15).any():
                raise ConfigError(
                    f"{self.name}{QZEROS} has 15: its writers differ in whether that is a zero of 0 or 16"
                )
            found = found + np.uint8(1)
        return found.astype(np.float16)


def _halves(words: np.ndarray) -> UInt8[np.ndarray, "*shape 8"]:
    """Return the half bytes of words, the lowest first."""
    packed = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*words.shape, PACK)


def _outputs(words: np.ndarray, rows: slice, order: tuple[int, ...]) -> UInt8[np.ndarray, "n rows"]:
    """Return codes of some outputs, which half bytes of a word are in this order."""
    first, last = rows.start // PACK, -(-rows.stop // PACK)
    found = _halves(words[:, first:last])[..., np.argsort(order)].reshape(len(words), -1)
    return found[:, rows.start - first * PACK : rows.stop - first * PACK]


def joined(folder: Path, settings: Int4Settings, tensors: Mapping[str, MappedTensor]) -> dict[str, StoredParameter]:
    """Return a matrix for each `.qweight` with what belongs to it, named `.weight`, and the other tensors.

    Raises:
        ConfigError: if a part is missing or has another shape or type, or inputs are not in their groups' order.

    """
    found: dict[str, StoredParameter] = {}
    own = {name.removesuffix(QWEIGHT) for name in tensors if name.endswith(QWEIGHT)}
    for name, tensor in tensors.items():
        base, _, part = name.rpartition(".")
        if base not in own or f".{part}" not in (QWEIGHT, QZEROS, SCALES, INDEX):
            if tensor.kind == "I32":
                raise ConfigError(f"{folder}: {name} is of I32: expected floats, or parts of a 4-bit matrix")
            found[name] = tensor
    return found | {f"{base}.weight": _matrix(folder, settings, base, tensors) for base in own}


def _matrix(folder: Path, settings: Int4Settings, base: str, tensors: Mapping[str, MappedTensor]) -> Int4Matrix:
    parts = [tensors.get(base + part) for part in (QWEIGHT, QZEROS, SCALES)]
    kinds = [None if part is None else part.kind for part in parts]
    if kinds != ["I32", "I32", "F16"]:
        raise ConfigError(f"{folder}: {base}: its qweight, qzeros and scales are {kinds}: expected I32, I32 and F16")
    words, zeros, scales = (part.values for part in parts if part is not None)
    if scales.ndim != 2 or scales.shape[1] % PACK:
        raise ConfigError(f"{folder}: {base}{SCALES} is {list(scales.shape)}: expected groups and outputs, by eights")
    groups, outputs = scales.shape
    inputs = groups * settings.group
    shape = (inputs, outputs // PACK) if settings.layout == AWQ else (inputs // PACK, outputs)
    if words.shape != shape or zeros.shape != (groups, outputs // PACK):
        told = f"qweight {list(words.shape)} and qzeros {list(zeros.shape)}"
        expected = f"{list(shape)} and {[groups, outputs // PACK]}"
        raise ConfigError(f"{folder}: {base}: {told} beside scales {list(scales.shape)}: expected {expected}")
    index = tensors.get(base + INDEX)
    if index is not None and not np.array_equal(index.values, np.arange(inputs) // settings.group):
        raise ConfigError(f"{folder}: {base}{INDEX} has inputs in another order (act-order), which is not supported")
    return Int4Matrix(base, settings.layout, settings.group, words, zeros, scales)
