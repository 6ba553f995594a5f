"""Tensors that hold a matrix of all experts: in numbers, or packed as MXFP4 (OCP Microscaling Formats, version 1.0)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.weights.parameters import StoredParameter, Values
from fullstride.llm.weights.safetensors_file import MappedTensor

BLOCKS, SCALES = "_blocks", "_scales"
# Numbers that share a scale, and the values of the sixteen codes (E2M1).
SHARED = 32
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Of a scale (E8M0), a power of two; the largest code is no number.
BIAS, NO_NUMBER = 127, 255


@dataclass(frozen=True)
class Mxfp4Matrix:
    """Matrix of 4-bit codes, two in a byte, the lower half first; 32 of a row share a scale.

    Attributes:
        name: name of its blocks in the file, for messages.
        blocks: codes.
        scales: exponents of two.

    """

    name: str
    blocks: UInt8[np.ndarray, "rows groups bytes"]
    scales: UInt8[np.ndarray, "rows groups"]
    kind: str = "MXFP4"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.blocks.shape[0], self.blocks.shape[1] * SHARED

    def read(self, rows: slice, columns: slice, dtype: np.dtype) -> Values:
        """A part; of a row only the groups that hold it are unpacked.

        Raises:
            ConfigError: for a scale that is no number.

        """
        groups = slice(columns.start // SHARED, -(-columns.stop // SHARED))
        packed, scales = self.blocks[rows, groups], self.scales[rows, groups]
        if (scales == NO_NUMBER).any():
            raise ConfigError(f"{self.name}: damaged: a scale of it is no number")
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], SHARED)
        values = np.ldexp(CODES[codes], scales[..., None].astype(np.int32) - BIAS)
        start = columns.start - groups.start * SHARED
        return values.reshape(len(packed), -1)[:, start : start + columns.stop - columns.start].astype(dtype)


def take_apart(
    folder: Path, config: ModelConfig, stacks: Mapping[str, tuple[str, ...]], tensors: Mapping[str, MappedTensor]
) -> tuple[dict[str, StoredParameter], dict[str, MappedTensor]]:
    """Return by our names the matrices and biases of each expert, and the tensors of no expert.

    Args:
        folder: of the model, for messages.
        config: configuration of the model.
        stacks: see `Family.stacked_experts`.
        tensors: all tensors; a matrix in numbers is (experts, in, out), one in MXFP4 (experts, out, groups, 16) with
            scales (experts, out, groups).

    Raises:
        ConfigError: if one is of another number of experts than configured, or has another shape.

    """
    found: dict[str, StoredParameter] = {}
    others = dict(tensors)
    for layer in range(config.layers) if stacks else ():
        for theirs, parts in stacks.items():
            name = f"model.layers.{layer}.{theirs}"
            for index, each in enumerate(_experts(folder, config, name, len(parts), others)):
                expert, part = divmod(index, len(parts))
                found[f"layers.{layer}.experts.{expert}.{parts[part]}"] = each
    if bytewise := [name for name, tensor in others.items() if tensor.kind == "U8"]:
        raise ConfigError(f"{folder}: {bytewise[0]} is of U8: expected bytes for MXFP4 of experts alone")
    return found, others


def _experts(
    folder: Path, config: ModelConfig, name: str, parts: int, others: dict[str, MappedTensor]
) -> list[StoredParameter]:
    """Take a tensor, or its blocks and scales, out of `others`; return the parts of each expert, one after another."""
    own = [others.pop(each) for each in (name, name + BLOCKS, name + SCALES) if each in others]
    packed = len(own) == 2
    ranks = [tensor.values.ndim for tensor in own]
    fits = [tensor.shape[0] == config.experts for tensor in own if tensor.shape]
    if ranks not in ([2], [3], [4, 3]) or fits != [True] * len(own) or packed != (own[0].kind == "U8"):
        raise ConfigError(
            f"{folder}: {name} of {config.experts} experts: expected one tensor, or its blocks and scales"
        )
    if packed and (own[0].shape[:-1] != own[1].shape or own[0].shape[-1] != SHARED // 2 or own[1].kind != "U8"):
        raise ConfigError(
            f"{folder}: {name}{BLOCKS} is {list(own[0].shape)}: expected {list(own[1].shape)} of 16 bytes"
        )
    rows = [(i, slice(part, None, parts)) for i in range(config.experts) for part in range(parts)]
    if packed:
        return [Mxfp4Matrix(name + BLOCKS, own[0].values[i, part], own[1].values[i, part]) for i, part in rows]
    values = own[0].values if ranks == [2] else own[0].values.swapaxes(1, 2)
    return [MappedTensor(values[i, part], own[0].kind) for i, part in rows]
