"""Matrices of e4m3 codes (arXiv:2209.05433) in checkpoints: a scale for each output, or for blocks of 128 by 128."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32

from fullstride.errors import ConfigError, shortened
from fullstride.llm.packed.formats import CodedRows
from fullstride.llm.weights.parameters import StoredParameter, Values
from fullstride.llm.weights.safetensors_file import MappedTensor

CODES = "F8_E4M3"
# Of a checkpoint with blocks, whose scales' names differ, too.
BLOCK = 128
WEIGHT, SCALES, BLOCK_SCALES = ".weight", ".weight_scale", ".weight_scale_inv"
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def has_fp8(file: Path, raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json says that matrices are e4m3 codes with scales of outputs or blocks.

    Activations are not rounded here, whatever it says of them: that is for GPUs' own fp8 products.

    Raises:
        ConfigError: for other scales, by the formats' names that are read.

    """
    own = raw.get("quantization_config")
    method = own.get("quant_method") if isinstance(own, dict) else None
    if not isinstance(own, dict) or method not in ("fp8", "fbgemm_fp8", "compressed-tensors") or kv_cache_alone(raw):
        return False
    if method == "fp8":
        fits = own.get("weight_block_size") == [BLOCK, BLOCK] and own.get("fmt", "e4m3") == "e4m3"
    elif method == "compressed-tensors":
        groups = own.get("config_groups")
        weights = [each.get("weights") for each in groups.values()] if isinstance(groups, dict) else []
        fits = bool(weights) and all(isinstance(each, dict) and CHANNELS.items() <= each.items() for each in weights)
    else:
        fits = True
    if not fits:
        expected = "8-bit floats with a scale for each output (channel), or weight_block_size [128, 128] of fp8"
        raise ConfigError(f"{file}: quantization_config={shortened(str(own), 200)}: expected {expected}")
    return True


def kv_cache_alone(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json's quantization is that of a KV cache, with weights as they are."""
    own = raw.get("quantization_config")
    return isinstance(own, dict) and bool(own.get("kv_cache_scheme")) and own.get("config_groups") in ({}, None)


@dataclass(frozen=True)
class Fp8Matrix:
    """Matrix of e4m3 codes times scales.

    Attributes:
        values: codes, as numbers of their own.
        scales: one for each output and group of inputs.
        kind: name of the packed format: `fp8`, whose group is a row, or `fp8_128`.

    """

    values: Float[np.ndarray, "out inner"]
    scales: Float32[np.ndarray, "out groups"]
    kind: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs."""
        return self.values.shape

    def codes(self, rows: slice, columns: slice) -> CodedRows:
        """A part as codes.

        Raises:
            ConfigError: if the columns begin or end within a block.

        """
        scales = self.scales[rows, self._groups(columns)]
        if self.kind != "fp8" and (columns.start % BLOCK or columns.stop % BLOCK):
            raise ConfigError(f"inputs {columns.start} to {columns.stop} are not whole blocks of {BLOCK}")
        codes = np.ascontiguousarray(self.values[rows, columns]).view(np.uint8)
        return CodedRows(self.kind, codes, np.ascontiguousarray(scales)[..., None].view(np.uint8))

    def read(self, rows: slice, columns: slice, dtype: np.dtype) -> Values:
        """A part as numbers."""
        part, scales = self.values[rows, columns].astype(np.float32), self.scales[rows, self._groups(columns)]
        if self.kind == "fp8":
            return (part * scales).astype(dtype)
        start = columns.start % BLOCK
        wide = np.repeat(scales, BLOCK, axis=1)[:, start : start + part.shape[1]]
        return (part * wide).astype(dtype)

    def _groups(self, columns: slice) -> slice:
        return slice(None) if self.kind == "fp8" else slice(columns.start // BLOCK, -(-columns.stop // BLOCK))


def joined(folder: Path, tensors: Mapping[str, MappedTensor]) -> dict[str, StoredParameter]:
    """Return a matrix for each tensor of codes and its scales, and the other tensors.

    Raises:
        ConfigError: if scales are missing or have another shape.

    """
    coded = {name for name, tensor in tensors.items() if tensor.kind == CODES}
    bases = {name.removesuffix(WEIGHT) for name in coded}
    scales = {base + part for base in bases for part in (SCALES, BLOCK_SCALES)}
    found: dict[str, StoredParameter] = {name: tensors[name] for name in tensors if name not in scales | coded}
    return found | {name: _matrix(folder, name, tensors) for name in coded}


def _matrix(folder: Path, name: str, tensors: Mapping[str, MappedTensor]) -> Fp8Matrix:
    values, base = tensors[name].values, name.removesuffix(WEIGHT)
    outputs, inputs = values.shape if values.ndim == 2 else (0, 0)
    single, blocks = tensors.get(base + SCALES), tensors.get(base + BLOCK_SCALES)
    if single is not None and blocks is None and single.values.size == outputs and outputs:
        return Fp8Matrix(values, single.values.reshape(-1, 1).astype(np.float32), "fp8")
    expected = [-(-outputs // BLOCK), -(-inputs // BLOCK)]
    if blocks is None or single is not None or list(blocks.shape) != expected or inputs % BLOCK:
        shapes = {part: list(tensors[base + part].shape) for part in (SCALES, BLOCK_SCALES) if base + part in tensors}
        told = f"{outputs} scales, or {expected} of blocks of {BLOCK} that inputs are a multiple of"
        raise ConfigError(f"{folder}: {name} {list(values.shape)} has the scales {shapes}: expected {told}")
    wide = np.repeat(blocks.values.astype(np.float32), BLOCK, axis=0)[:outputs]
    return Fp8Matrix(values.view(ml_dtypes.float8_e4m3fn), wide, f"fp8_{BLOCK}")
