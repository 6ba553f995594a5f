"""Tuning of the attention forward: `python -m benchmarks.tuning.attention_forward --out OUT`; see `tuner`."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.jvp.shapes import TUNING
from benchmarks.tuning.tuner import Result, fastest_first, main, measured, say
from fullstride.jvp.attention import forward_kernel, hopper_kernel
from fullstride.jvp.attention.forward_table import ForwardConfig, SpecialisedConfig
from fullstride.jvp.attention.launch_forward import forward
from fullstride.measure.timing import Call

# (batch, heads, length, head dim)
CASES = {name: shape.q for name, shape in TUNING.items()}
# Error bound of a correct candidate in bf16, relative to the largest value of the reference.
ALLOWED = 0.03
# Of the warp-specialised kernel, keys of a block and stages; of the Triton kernels, rows, keys and warps: by head dim.
SPECIALISED = {64: [(64, 2), (64, 3), (64, 4), (128, 2)], 128: [(64, 2), (32, 3), (32, 4)]}
TILED = {
    64: [(128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4), (64, 32, 4), (128, 32, 8)],
    80: [(64, 64, 4), (128, 64, 8), (64, 32, 4), (128, 32, 8), (64, 128, 8), (128, 128, 8)],
    128: [(128, 64, 8), (128, 32, 8), (64, 64, 4), (64, 32, 4), (64, 64, 8)],
}


def candidates(dim: int) -> list[SpecialisedConfig | ForwardConfig]:
    """Return configurations worth a measurement."""
    specialised = [SpecialisedConfig(n, s, turns) for n, s in SPECIALISED.get(dim, []) for turns in (False, True)]
    tma = [False] if dim == 80 else [True, False]
    return [*specialised, *(ForwardConfig(m, n, w, s, tma=t) for m, n, w in TILED[dim] for s in (1, 2, 3) for t in tma)]


def make(case: tuple[int, int, int, int]) -> list[Tensor]:
    """Draw q, k, v and their tangents."""
    return [torch.randn(case, device="cuda", dtype=torch.bfloat16) for _ in range(6)]


def reference(inputs: list[Tensor], rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return o and to for some rows of the last head, in fp64."""
    q, k, v, tq, tk, tv = (x[-1, -1].double() for x in inputs)
    p = torch.softmax(scale * q[rows] @ k.mT, -1)
    ts = scale * (tq[rows] @ k.mT + q[rows] @ tk.mT)
    return p @ v, (p * (ts - (p * ts).sum(-1, keepdim=True))) @ v + p @ tv


def _call(inputs: list[Tensor], config: Any) -> Call:
    return lambda: forward(*inputs, scale=inputs[0].shape[3] ** -0.5, config=config)[:2]


def tune(case: str) -> list[Result]:
    """Time all candidates of a case, fastest first."""
    b, h, length, dim = CASES[case]
    inputs, rows = make(CASES[case]), torch.randint(0, length, (64,), device="cuda")
    expected, flop = reference(inputs, rows, dim**-0.5), 12.0 * b * h * length**2 * dim

    def error(found: tuple[Tensor, ...]) -> float:
        """Return the largest error of o and to relative to the largest value."""
        pairs = zip(found, expected, strict=True)
        return max(((x[-1, -1, rows].double() - y).abs().max() / y.abs().max()).item() for x, y in pairs)

    found = []
    for config in candidates(dim):
        calls = [_call(inputs, config)] * (1 if flop > 1e12 else 10)
        row = measured(str(config), calls, error, ALLOWED, (forward_kernel, hopper_kernel))
        found.append(say(case, row | ({"tflops": flop / row["ms"] / 1e9} if "ms" in row else {})))
    return fastest_first(found)


def calls_of(case: str) -> list[Call]:
    """Return calls of the candidates of a case on inputs that are cheap but compile to the same kernels."""
    _, h, length, dim = CASES[case]
    inputs = make((1, h, min(length, 2048), dim))
    return [_call(inputs, config) for config in candidates(dim)]


if __name__ == "__main__":
    main(__doc__, "benchmarks.tuning.attention_forward", list(CASES), calls_of, tune)
