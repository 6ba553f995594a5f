"""Sizes that tests, benchmarks and tuning share."""

from dataclasses import dataclass


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


# Reference 3's table: one batch, heads of 128 columns.
LENGTHS = (128, 1024, 4096, 8192, 16384, 32768)
REFERENCE = [AttentionShape("table", 1, heads, length, 128) for heads in (1, 24) for length in LENGTHS]
# What must be fast: a video model's layer, the public record's shape, a DiT's layer, a U-Net's.
SPEED = [
    AttentionShape("long128", 1, 24, 16384, 128),
    AttentionShape("long64", 1, 32, 8192, 64),
    AttentionShape("dit", 64, 12, 256, 64),
    AttentionShape("unet80", 64, 4, 256, 80),
]
# Shapes that the kernels are tuned for, by name.
TUNING = {shape.name: shape for shape in SPEED}
TUNING |= {"unet64": AttentionShape("unet64", 64, 4, 256, 64), "mid128": AttentionShape("mid128", 4, 16, 2048, 128)}
# What a kernel may stumble over: one row, lengths that fill no block, heads between powers of two, shared keys.
ODD = [
    AttentionShape("one", 1, 1, 1, 16),
    AttentionShape("one_key", 2, 3, 65, 32, keys=1),
    AttentionShape("prime", 1, 2, 127, 64),
    AttentionShape("cross", 2, 3, 77, 64, keys=259),
    AttentionShape("wide72", 2, 2, 129, 72),
    AttentionShape("wide96", 1, 3, 191, 96),
    AttentionShape("widest", 1, 2, 97, 256),
    AttentionShape("values", 1, 2, 130, 64, dim_v=32),
    AttentionShape("grouped", 2, 6, 100, 64, kv_heads=2),
    AttentionShape("shared", 1, 8, 33, 128, keys=150, kv_heads=1),
]
# For a processor.
SMALL = [AttentionShape("small", 1, heads, length, 64) for heads in (1, 3) for length in (128, 333)]
# At which the errors of all formats are compared.
ERRORS = AttentionShape("errors", 2, 4, 512, 64)

IMAGES = tuple((64, channels, side, side) for channels in (128, 256, 512) for side in (32, 16, 8))
UNET_LEVELS = ((64, 128, 32, 32), (64, 256, 16, 16), (64, 512, 8, 8))
TOKENS = tuple((64, 256, width) for width in (384, 768, 1024, 1152))
DIT_TOKENS = ((64, 256, 768), (64, 256, 1152))


def _groups(sizes: tuple[tuple[int, ...], ...], groups: int, acts: tuple[str | None, ...]) -> list[NormShape]:
    return [
        NormShape("group_norm", size, groups, act, last) for size in sizes for act in acts for last in (False, True)
    ]


def _rows(
    sizes: tuple[tuple[int, ...], ...], ops: tuple[str, ...] = ("layer_norm", "rms_norm", "ada_layer_norm")
) -> list[NormShape]:
    return [NormShape(op, size) for op in ops for size in sizes]


BOTH = (None, "silu")
NORMS = [*_groups(UNET_LEVELS, 32, BOTH), *_rows(DIT_TOKENS)]
NORMS_ODD = [
    *_groups(((2, 24, 1, 1), (3, 30, 7, 5), (1, 64, 150, 150)), 2, BOTH),
    *_rows(((3, 37, 100), (2, 1, 33), (1, 3, 5000))),
]
NORMS_SMALL = [*_groups(((3, 32, 9, 9),), 8, BOTH), *_rows(((4, 33, 96),))]
# Shapes that the norms' kernels are tuned for.
NORMS_TUNING = [
    *_rows(TOKENS, ("layer_norm",)),
    *_rows((TOKENS[0], TOKENS[-1]), ("rms_norm", "ada_layer_norm")),
    *_groups(IMAGES, 32, ("silu",)),
    *_groups(IMAGES[:1], 32, (None,)),
]
