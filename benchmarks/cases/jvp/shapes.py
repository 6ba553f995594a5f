"""Sizes that tests, benchmarks and tuning share, as `shapes.toml` declares them."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class AttentionShape:
    """Size of an attention without a mask."""

    name: str
    batch: int  # this and the next three: of q; the last three: of k and v, those of q unless given
    heads: int
    length: int
    dim: int
    keys: int = 0
    kv_heads: int = 0
    dim_v: int = 0

    @property
    def q(self) -> tuple[int, int, int, int]:
        """Shape of the queries."""
        return self.batch, self.heads, self.length, self.dim

    @property
    def k(self) -> tuple[int, int, int, int]:
        """Shape of the keys."""
        return self.batch, self.kv_heads or self.heads, self.keys or self.length, self.dim

    @property
    def v(self) -> tuple[int, int, int, int]:
        """Shape of the values."""
        return *self.k[:3], self.dim_v or self.dim

    @property
    def product(self) -> int:
        """Operations of one product of all scores with queries, keys or values, 2 per multiply-add."""
        width = (self.dim + self.v[3]) // 2
        return 2 * self.batch * self.heads * self.length * self.k[2] * width

    @property
    def matrix(self) -> int:
        """Number of elements of all scores."""
        return self.batch * self.heads * self.length * self.k[2]

    def __str__(self) -> str:
        """Return the size as written in tables."""
        return f"{self.name} B{self.batch} H{self.heads} L{self.length} D{self.dim}"


@dataclass(frozen=True)
class NormShape:
    """Size of a norm."""

    op: str  # `group_norm`, `layer_norm`, `rms_norm` or `ada_layer_norm`
    size: tuple[int, ...]  # x's shape
    groups: int = 0  # this and the next: of a group norm
    act: str | None = None
    channels_last: bool = False  # how its images lie in memory

    @property
    def parameters(self) -> tuple[int, ...]:
        """Shape of weight and bias, or of scale and shift."""
        if self.op == "ada_layer_norm":
            return self.size[0], self.size[-1]
        return (self.size[1 if self.op == "group_norm" else -1],)

    def __str__(self) -> str:
        """Return the size as written in tables."""
        extras = [self.act or "", "channels_last" if self.channels_last else ""]
        return " ".join([self.op, "x".join(map(str, self.size)), *filter(None, extras)])


def distinct(shapes: list[AttentionShape]) -> list[AttentionShape]:
    """Remove sizes that appear earlier under another name."""
    found: dict[object, AttentionShape] = {}
    for shape in shapes:
        found.setdefault((shape.q, shape.k, shape.v), shape)
    return list(found.values())


def _norms(name: str) -> list[NormShape]:
    """Return the declared norms of a name; a group norm lies in memory in both orders."""
    return [
        NormShape(op, tuple(size), given.get("groups", 0), act or None, last)
        for given in DECLARED["norms"][name]
        for op in given["ops"]
        for size in given["sizes"]
        for act in given.get("acts", [""])
        for last in ([False, True] if op == "group_norm" else [False])
    ]


DECLARED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("shapes.toml").read_text())
# Reference 3's table: one batch, heads of 128 columns.
LENGTHS = (128, 1024, 4096, 8192, 16384, 32768)
REFERENCE = [AttentionShape("table", 1, heads, length, 128) for heads in (1, 24) for length in LENGTHS]
# For a processor.
SMALL = [AttentionShape("small", 1, heads, length, 64) for heads in (1, 3) for length in (128, 333)]
SPEED, MORE, ODD, (ERRORS,) = (
    [AttentionShape(**given) for given in DECLARED["attention"][name]] for name in ("speed", "tuning", "odd", "errors")
)
# Shapes that the kernels are tuned for, by name.
TUNING = {shape.name: shape for shape in (*SPEED, *MORE)}
NORMS, NORMS_ODD, NORMS_SMALL, NORMS_TUNING = map(_norms, ("models", "odd", "small", "tuning"))
