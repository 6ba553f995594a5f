"""Tuning of the norms' kernels: `python -m benchmarks.tuning.norms --out OUT`; see `tuner`.

Beside each stands a copy of as many bytes. Bytes are counted as activations read and written once: forward 4 (x, tx, y,
ty), detached backward 3 (gy, x, dx), full backward 6 (gy, gty, x, tx, dx, dtx). Calls go in turn through several sets
of inputs. The first candidate is the table's; the best ones belong into `row_configs` and `group_configs`.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.cases.jvp.shapes import NORMS_TUNING
from benchmarks.tuning.tuner import Result, fastest_first, main, measured, say, time_ms
from fullstride.jvp.norms import group_configs, group_norm, naive, row_configs, rows
from fullstride.jvp.norms.closed_form import ROW_NORMS, Affine
from fullstride.jvp.norms.group_configs import GroupConfig, GroupSize, on_chip
from fullstride.jvp.norms.launch import padded
from fullstride.jvp.norms.row_configs import EVERY, RowConfig
from fullstride.measure.timing import Call

PASSES = {"forward": 4, "detached": 3, "full": 6}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CACHE_BYTES = 400_000_000
TOLERANCE = {"bf16": 2**-7, "fp32": 2e-5}
LARGEST = {"forward": 16384, "detached": 16384, "full": 4096}


@dataclass(frozen=True)
class NormCase:
    """Norm at one size."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    work: str
    channels_last: bool = False
    act: str | None = None

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        parts = [self.op, self.work, self.dtype, size, self.act, "channels_last" if self.channels_last else None]
        return " ".join(filter(None, parts))

    def bytes(self) -> int:
        """Bytes of the activations' traffic."""
        return PASSES[self.work] * torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize

    def sets(self) -> int:
        """Return how many sets of inputs exceed the cache."""
        return max(2, min(32, CACHE_BYTES // self.bytes()))

    def draw(self) -> tuple[Any, ...]:
        """Draw the arguments of the call: activations, parameters and, backward, the moments."""
        g, t, x, tx = (self._activation() for _ in range(4))
        channel = 1 if self.op == "group_norm" else -1
        size = (self.shape[0], self.shape[-1]) if self.op == "ada_layer_norm" else (self.shape[channel],)
        w, b, tw, tb = (torch.randn(size, device="cuda") for _ in range(4))
        if self.op != "ada_layer_norm" or self.work == "detached":
            tw = tb = None
        affine = Affine(w, None, tw) if self.op == "rms_norm" else Affine(w, b, tw, tb)
        groups, act = ((32,), (self.act,)) if self.op == "group_norm" else ((), ())
        norm = () if self.op == "group_norm" else (ROW_NORMS[self.op],)
        forward = (*norm, x, tx, *groups, affine, 1e-5, *act)
        if self.work == "forward":
            return forward
        moments = tuple(self.call(naive, "")(*forward)[2:])
        if self.work == "detached":
            t, tx = None, None
        return (*norm, g, t, x, tx, *groups, affine, moments, *act)

    def _activation(self) -> Tensor:
        a = torch.randn(self.shape, device="cuda", dtype=DTYPES[self.dtype])
        return a.contiguous(memory_format=torch.channels_last) if self.channels_last else a

    def call(self, module: Any, part: str | None = None) -> Callable[..., Any]:
        """Return the function of a module that does the work, or that of another part of it."""
        part = ("" if self.work == "forward" else "_backward") if part is None else part
        return getattr(module, ("group_norm" if self.op == "group_norm" else "row_norm") + part)

    @property
    def module(self) -> Any:
        """Return the module of the kernels."""
        return group_norm if self.op == "group_norm" else rows

    def candidates(self) -> list[RowConfig | GroupConfig]:
        """Return launches worth a measurement, the table's first."""
        if self.op != "group_norm":
            given = self.work, self.shape[-1], self.op == "ada_layer_norm"
            return list(dict.fromkeys([row_configs.row_config(*given), *row_candidates(*given)]))
        n, c, h, w = self.shape
        itemsize = DTYPES[self.dtype].itemsize
        size = GroupSize(n, 32, c // 32, h * w, self.channels_last, itemsize, self.act is not None)
        return list(dict.fromkeys([group_configs.group_config(self.work, size), *group_candidates(self.work, size)]))


# What decides is how many warps a multiprocessor holds and how many instructions an element takes: only what is close
# by these two is listed.
def row_candidates(work: str, length: int, modulated: bool) -> Iterator[RowConfig]:
    """Return launches for LayerNorm, RMSNorm and adaptive LayerNorm: a row per warp or two; three tiles in flight."""
    width = 128 if length <= 640 else 256
    if work == "forward":
        yield RowConfig(width, 1024 // width, 4, EVERY)
        for warps, programs in ((1, 2112), (2, 1056), (2, 2112), (4, 528)) if modulated else ():
            yield RowConfig(width, 1, warps, programs, 3, keep=True)
        return
    for warps, programs in ((1, 1056), (1, 2112), (2, 528), (2, 1056)):
        yield RowConfig(width, 1, warps, programs, 3, keep=True)
    yield RowConfig(width, 2, 1, 1056, 3, keep=True)
    yield RowConfig(width, 256 // width, 4, 528, 1)
    if length > 768:
        for warps in (2, 4):
            yield RowConfig(512, 1, warps, 2112 // (2 * warps), 3, keep=True)


def group_candidates(work: str, size: GroupSize) -> Iterator[GroupConfig]:
    """Return launches for GroupNorm: 32 and 64 contiguous bytes in channels_last; many warps, or long threads."""
    pad = padded(size.group_channels)
    for wide in (32, 64) if size.channels_last else (0,):
        count = max(1, wide // (size.element_bytes * pad))
        elements = count * pad * size.pixels
        if elements <= LARGEST[work]:
            for thread in (16,) if work == "full" else (32,) if elements > 8192 else (16, 32):
                yield on_chip(size, count, thread)
        if size.element_bytes == 2 and elements >= 4096:
            for thread in (32, 64):
                if 4 <= elements // (32 * thread) <= 16 and elements <= 32768:
                    yield on_chip(size, count, thread, packed=True)
    if pad * size.pixels >= 16384:
        yield GroupConfig(max(1, 32 // (size.element_bytes * pad)), 128, 4, 3)


# U-Net and DiT sizes.
CASES = {
    str(case): case
    for case in (
        NormCase(shape.op, shape.size, dtype, work, shape.channels_last, shape.act)
        for work in PASSES
        for dtype in DTYPES
        for shape in NORMS_TUNING
        if dtype == "bf16" or shape.op != "group_norm" or shape.size[1] != 256
    )
}


def copy_ms(size: int, sets: int) -> float:
    """Return the time of a copy that reads and writes `size` bytes together."""
    pairs = [[torch.empty(size // 2, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(sets)]
    return time_ms([partial(a.copy_, b) for a, b in pairs])["ms"]


def tune(name: str) -> Result:
    """Time each candidate, fastest first, and a copy."""
    case = CASES[name]
    sets = [case.draw() for _ in range(case.sets())]
    exact = case.call(naive)(*pytree.tree_map_only(Tensor, Tensor.double, sets[0]))
    copied, call = copy_ms(case.bytes(), case.sets()), case.call(case.module)

    def error(found: tuple[Tensor | None, ...]) -> float:
        pairs = [(a.double(), b) for a, b in zip(found, exact, strict=True) if a is not None and b is not None]
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)

    found = []
    for config in case.candidates():
        calls = [partial(call, *given, config=config) for given in sets]
        row = measured(str(config), calls, error, TOLERANCE[case.dtype], (case.module,))
        found.append(
            say(name, row | {"config": asdict(config)} | ({"of_copy": copied / row["ms"]} if "ms" in row else {}))
        )
    return {"copy_ms": copied, "table": found[0], "launches": fastest_first(found)}


def calls_of(name: str) -> list[Call]:
    """Return calls of the candidates of a case."""
    case = CASES[name]
    given = case.draw()
    return [partial(case.call(case.module), *given, config=config) for config in case.candidates()]


if __name__ == "__main__":
    main(__doc__, "benchmarks.tuning.norms", list(CASES), calls_of, tune)
