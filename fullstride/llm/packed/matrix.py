"""Packed matrices on the device, and their numbers and products in plain JAX."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from fullstride.llm.packed.formats import FORMATS, INT4_GROUPS, RUN, TILE_INPUTS, TILE_OUTPUTS

# Numbers of a matrix that are unpacked at once: a product never has more of its matrix in memory.
AT_ONCE = 1 << 24


@dataclass(frozen=True)
class PackedMatrix:
    """Matrix (out, inner) of a format of `FORMATS`, as a tree of two arrays.

    Attributes:
        codes: uint8 array; see `fullstride.llm.packed.formats.array_shapes`. In a tree of something else, its leaf.
        records: uint8 array, or leaf.
        format: name of the format.

    """

    codes: Any
    records: Any
    format: str

    @property
    def tiled(self) -> bool:
        """Tell whether its codes are in the order of the tensor cores' fragments."""
        return self.codes.ndim == 3

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        if self.tiled:
            return self.codes.shape[0] * TILE_OUTPUTS, self.codes.shape[1] * TILE_INPUTS
        return self.codes.shape[0], self.codes.shape[1] * 8 // FORMATS[self.format].bits

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.codes.nbytes + self.records.nbytes

    def part(self, start: Int[Array, ""], count: int) -> "PackedMatrix":
        """Return `count` outputs, whole tiles of them if it is tiled; a start too near to the end is moved."""
        unit = TILE_OUTPUTS if self.tiled else 1
        cut = partial(lax.dynamic_slice_in_dim, start_index=start // unit, slice_size=count // unit)
        return PackedMatrix(cut(self.codes), cut(self.records), self.format)

    def rows(self, indices: Int[Array, " N"], dtype: DTypeLike) -> Float[Array, "N inner"]:
        """Return some rows as numbers."""
        if not self.tiled:
            return numbers(PackedMatrix(self.codes[indices], self.records[indices], self.format), dtype)
        tile, row = indices // TILE_OUTPUTS, (indices % TILE_OUTPUTS)[:, None, None]
        whole = PackedMatrix(self.codes[tile], self.records[tile], self.format)
        codes = codes_of(whole).reshape(len(indices), TILE_OUTPUTS, -1)
        own = jnp.take_along_axis(codes, row, 1)[:, 0]
        return _numbers(self.format, own, jnp.take_along_axis(whole.records, row[..., None], 2)[:, :, 0], dtype)


jax.tree_util.register_dataclass(PackedMatrix, data_fields=("codes", "records"), meta_fields=("format",))


class JoinedMatrix(NamedTuple):
    """Matrix whose outputs are those of several, as GGUF has queries and values in different formats."""

    parts: "tuple[PackedMatrix | Float[Array, 'out inner'], ...]"


# What a product reads.
Weight = Float[Array, "out inner"] | PackedMatrix | JoinedMatrix


def numbers(matrix: PackedMatrix, dtype: DTypeLike) -> Float[Array, "out inner"]:
    """Return a matrix as numbers: computed in fp32, as ggml does, and rounded to `dtype`."""
    return _numbers(matrix.format, codes_of(matrix), _records_of(matrix), dtype)


def _numbers(name: str, codes: Array, records: Array, dtype: DTypeLike) -> Float[Array, "out inner"]:
    """Return codes (out, inner) with records (out, blocks, bytes) as numbers."""
    form, (scales, minima) = FORMATS[name], _scales_of(name, records)
    if form.name.startswith("fp8"):
        values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    else:
        values = codes.astype(jnp.float32) - form.zero
    grouped = values.reshape(*scales.shape, -1) * scales[..., None]
    if minima is not None:
        grouped = grouped + minima[..., None]
    return grouped.reshape(codes.shape).astype(dtype)


def product(x: Float[Array, "T inner"], matrix: PackedMatrix, kind: DTypeLike) -> Float[Array, "T out"]:
    """x W^T with sums in fp32, the result of dtype `kind`; at most `AT_ONCE` numbers of W are unpacked at a time.

    Parts are unpacked in a loop, even if there are two, because a loop begins when x is there: XLA would take numbers
    that depend on nothing but the weights out of loops over steps, or unpack those of all layers first.
    """
    outputs, inputs = matrix.shape
    unit = TILE_OUTPUTS if matrix.tiled else 1
    dot = partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        # TF32 would be a silent loss for whoever asked for fp32.
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    halves = FORMATS[matrix.format].bits == 4 and not matrix.tiled

    def product_of(part: PackedMatrix) -> Array:
        if not halves:
            return dot(x, numbers(part, x.dtype)).astype(kind)
        (low, high), own = _half_numbers(part, x.dtype), x.reshape(len(x), -1, 2, RUN // 2)
        first, second = (own[:, :, i].reshape(len(x), -1) for i in range(2))
        return (dot(first, low) + dot(second, high)).astype(kind)

    each = max(1, min(AT_ONCE // inputs // unit, -(-outputs // (2 * unit)))) * unit
    if outputs == each:
        return product_of(matrix)

    def step(i: Int[Array, ""], y: Array) -> Array:
        # The last part begins earlier, and repeats some outputs.
        start = jnp.minimum(i * each, outputs - each)
        return lax.dynamic_update_slice_in_dim(y, product_of(matrix.part(start, each)), start, 1)

    return lax.fori_loop(0, -(-outputs // each), step, jnp.zeros((len(x), outputs), kind))


def _half_numbers(matrix: PackedMatrix, dtype: DTypeLike) -> tuple[Array, Array]:
    """Return the numbers of the low and of the high halves of bytes in runs, each (out, inner / 2).

    Apart they are where their bytes are, which a CPU unpacks four times as fast as numbers in their own order.
    """
    form, outputs = FORMATS[matrix.format], matrix.shape[0]
    scales, minima = (
        None if each is None else jnp.repeat(each, form.group // RUN, axis=1)[..., None]
        for each in _scales_of(matrix.format, matrix.records)
    )
    codes = matrix.codes.reshape(outputs, -1, RUN // 2)
    made = [(half.astype(jnp.float32) - form.zero) * scales for half in (codes & 15, codes >> 4)]
    made = [half if minima is None else half + minima for half in made]
    low, high = (half.reshape(outputs, -1).astype(dtype) for half in made)
    return low, high


def codes_of(matrix: PackedMatrix) -> UInt8[Array, "out inner"]:
    """Return the code of each number."""
    bits = FORMATS[matrix.format].bits
    return (_TILES if matrix.tiled else _RUNS)[bits](matrix.codes).reshape(matrix.shape)


def _records_of(matrix: PackedMatrix) -> UInt8[Array, "out blocks bytes"]:
    """Return the records of each output."""
    if not matrix.tiled:
        return matrix.records
    return matrix.records.swapaxes(1, 2).reshape(matrix.shape[0], -1, matrix.records.shape[-1])


def _scales_of(
    name: str, records: UInt8[Array, "out blocks bytes"]
) -> tuple[Float[Array, "out groups"], Float[Array, "out groups"] | None]:
    """Return scale and minimum of each group, fp32."""
    scales, minima = _RECORDS[name](records)
    flat = lambda x: x.reshape(len(records), -1)  # noqa: E731
    return flat(scales), None if minima is None else flat(minima)


def _halves(records: Array, first: int) -> Array:
    """Two bytes of each record, as a float16."""
    return lax.bitcast_convert_type(records[..., first : first + 2], jnp.float16).astype(jnp.float32)


def _scale(records: Array) -> tuple[Array, None]:
    return _halves(records, 0), None


def _scale_and_minimum(records: Array) -> tuple[Array, Array]:
    return _halves(records, 0), _halves(records, 2)


def _scale_and_zero(records: Array) -> tuple[Array, Array]:
    return _halves(records, 0), -_halves(records, 0) * _halves(records, 2)


def _fp8(records: Array) -> tuple[Array, None]:
    return lax.bitcast_convert_type(records, jnp.float32), None


def _q4_k(records: Array) -> tuple[Array, Array]:
    """Eight scales and minima of six bits: four low ones of each, then two high ones."""
    low, high = records[..., 4:12], records[..., 12:16]
    low = _fields(low, 4).reshape(*low.shape[:-1], 2, 8)
    six = low | _fields(high, 2).reshape(low.shape) << 4
    scaled = _halves(records, 0)[..., None] * six[..., 0, :], _halves(records, 2)[..., None] * six[..., 1, :]
    return scaled[0], -scaled[1]


def _q6_k(records: Array) -> tuple[Array, None]:
    own = lax.bitcast_convert_type(records[..., :16], jnp.int8).astype(jnp.float32)
    return _halves(records, 16)[..., None] * own, None


_RECORDS = {
    "Q4_0": _scale,
    "Q8_0": _scale,
    "Q4_1": _scale_and_minimum,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "fp8": _fp8,
    "fp8_128": _fp8,
    **{f"int4_{size}": _scale_and_zero for size in INT4_GROUPS},
}


def _fields(packed: Array, bits: int) -> Array:
    """Split each byte into fields, the lowest first, along a new last axis; in one loop with what follows."""
    return (packed[..., None] >> jnp.arange(0, 8, bits, dtype=jnp.uint8)) & ((1 << bits) - 1)


def _runs_4(codes: Array) -> Array:
    return _fields(codes.reshape(len(codes), -1, RUN // 2), 4).swapaxes(-1, -2)


def _runs_6(codes: Array) -> Array:
    low, high = jnp.split(codes.reshape(len(codes), -1, RUN * 3 // 4), (RUN // 2,), -1)
    both = (_fields(part, bits).swapaxes(-1, -2).reshape(*part.shape[:2], RUN) for part, bits in ((low, 4), (high, 2)))
    first, second = both
    return first | second << 4


def _tiles_4(codes: Array) -> Array:
    found = codes.reshape(*codes.shape[:2], 2, 8, 4, 4, 2, 2)
    return _fields(found, 4).transpose(0, 8, 3, 1, 2, 5, 7, 4, 6)


def _tiles_6(codes: Array) -> Array:
    low, high = jnp.split(codes, (TILE_OUTPUTS * TILE_INPUTS // 2,), -1)
    found = high.reshape(*codes.shape[:2], 8, 4, 4, 2, 2)
    fields = _fields(found, 2).reshape(*found.shape, 2, 2)
    low = _tiles_4(low)
    return low | fields.transpose(0, 8, 2, 1, 4, 6, 7, 3, 5).reshape(low.shape) << 4


def _tiles_8(codes: Array) -> Array:
    return codes.reshape(*codes.shape[:2], 4, 8, 4, 2, 2, 2, 2).transpose(0, 8, 3, 1, 2, 5, 6, 4, 7)


_RUNS = {4: _runs_4, 6: _runs_6, 8: lambda codes: codes}
_TILES = {4: _tiles_4, 6: _tiles_6, 8: _tiles_8}
