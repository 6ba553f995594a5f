"""Any layout of the arguments: fake results have the strides of real ones, and kernels read values, not memory."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from fullstride.jvp.attention.register import ATTENTION, VARLEN
from fullstride.jvp.dual_op import DualOp
from fullstride.jvp.norms.register import ADA_LAYER_NORM, GROUP_NORM, LAYER_NORM, RMS_NORM

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # of rows that are expanded, all alike
    # Lanes of a tile beyond its group hold what was in memory, in the interpreter; what they give is not stored.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter's
]

# Shapes of the primals, which of them the tangents are of, and the settings before the implementation.
CASES: dict[str, tuple[DualOp, list[tuple[int, ...]], tuple[Any, ...]]] = {
    "layer_norm": (LAYER_NORM, [(2, 2, 3, 8), (8,), (8,)], (1e-5, None)),
    "rms_norm in bf16": (RMS_NORM, [(3, 2, 8), (8,)], (1e-5, torch.bfloat16)),
    "ada_layer_norm": (ADA_LAYER_NORM, [(2, 3, 8), (2, 8), (2, 8)], (1e-5, None)),
    "group_norm of images": (GROUP_NORM, [(2, 8, 3, 4), (2, 8), (8,), (8,)], (2, 1e-5, "silu", None)),
    "group_norm of rows": (GROUP_NORM, [(3, 8, 6), (3, 8), (8,), (8,)], (4, 1e-5, "", torch.float16)),
    "group_norm of volumes": (GROUP_NORM, [(2, 4, 2, 3, 2), (2, 4), (4,), (4,)], (2, 1e-5, "", None)),
    "attention": (ATTENTION, [(2, 4, 5, 16), (2, 2, 6, 16), (2, 2, 6, 16), (2, 4, 5, 6)], (0.3, False, -1, -1, "")),
}
LAYOUTS = ["row-major", "permuted", "sliced", "expanded", "channels_last", "transposed view"]


def laid(shape: tuple[int, ...], layout: str, draw: random.Random) -> Tensor:
    """Draw normal numbers of this shape in a memory layout."""
    dims = list(range(len(shape)))
    if layout == "permuted":
        draw.shuffle(dims)
    elif layout == "channels_last" and len(shape) > 2:
        dims = [0, *dims[2:], 1]
    elif layout == "transposed view" and len(shape) > 1:
        dims[-2:] = reversed(dims[-2:])
    wide = [2 * shape[d] if layout == "sliced" else shape[d] for d in dims]
    if layout == "expanded":
        wide[draw.randrange(len(wide))] = 1
    x = torch.randn(wide)
    x = x[tuple(slice(None, shape[d]) for d in dims)] if layout == "sliced" else x.expand([shape[d] for d in dims])
    return x.permute([dims.index(d) for d in range(len(shape))])


def strides(x: Tensor | None) -> object:
    """Return the layout that a compiler asserts: a dimension of one element has no stride."""
    if x is None:
        return None
    return tuple(x.shape), x.dtype, [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]


def grid() -> list[Any]:
    """Return every case in every layout; in Triton's interpreter, which takes a second, one of them at random."""
    draw, cells = random.Random(0), list[Any]()
    for name in CASES:
        quick = draw.choice(LAYOUTS)
        cells += [(name, layout, "plain") for layout in LAYOUTS]
        for layout in LAYOUTS:
            marks = () if layout == quick else (pytest.mark.thorough,)
            cells.append(pytest.param(name, layout, "triton", marks=marks))
    return cells


@pytest.mark.parametrize(("name", "layout", "implementation"), grid())
def test_shapes_have_the_strides_of_the_results(name, layout, implementation):
    op, shapes, settings = CASES[name]
    draw = random.Random(f"{name} {layout}")
    torch.manual_seed(draw.randrange(1000))
    primals = [laid(shape, draw.choice(LAYOUTS) if i else layout, draw) for i, shape in enumerate(shapes)]
    tangents = [laid(shape, draw.choice(LAYOUTS), draw) for shape in shapes[: len(op.tangents)]]
    tensors, options = [*primals, *tangents], [*settings, implementation]
    found = op.run(*tensors, *options)
    assert list(map(strides, found)) == list(map(strides, op.empty(*tensors, *options)))
    of_outputs = [laid(tuple(x.shape), draw.choice(LAYOUTS), draw).to(x.dtype) for x in found[:2] if x is not None]
    gradients = op.gradients(*of_outputs, *op.kept(tensors, found, True), *options, op.seldom is not None)
    assert list(map(strides, gradients)) == [strides(op.gradient_like(primals[0], x)) for x in tensors]


def read_lazily(shape: tuple[int, ...], draw: random.Random) -> Tensor:
    """Draw numbers that memory does not hold as they are, or not one after the other."""
    kind = draw.choice(["negated", "zeros", "expanded", "sliced"])
    if kind == "negated":
        return torch.randn(*shape, dtype=torch.complex64).conj().imag
    return torch._efficientzerotensor(shape) if kind == "zeros" else laid(shape, kind, draw)


@pytest.mark.parametrize("name", [*CASES, "packed attention"])
def test_kernels_read_values_and_not_memory(name, seed):
    draw = random.Random(f"{name} {seed}")
    torch.manual_seed(draw.randrange(1000))
    op, shapes, (*settings, _) = CASES.get(name, (VARLEN, [(5, 2, 16)] * 3, (3, 3, 0.3, False, -1, -1, "")))
    settings.append("" if op in (ATTENTION, VARLEN) else None)  # the format
    primals, tangents = ([read_lazily(shape, draw) for shape in shapes] for _ in range(2))
    if op is VARLEN:
        primals += [torch.tensor([[0, 9], [2, 9], [5, 9]], dtype=torch.int32)[:, 0]] * 2
    tensors = [*primals, *tangents[: len(op.tangents)]]
    exact = [x.to(torch.float64, copy=True) if x.is_floating_point() else x for x in tensors]
    found, wanted = op.run(*tensors, *settings, "triton"), op.run(*exact, *settings, "plain")
    given = [read_lazily(tuple(x.shape), draw) for x in wanted[:2] if x is not None]
    of_outputs = [x.to(torch.float64, copy=True) for x in given]
    more = op.seldom is not None
    gradients = op.gradients(*given, *op.kept(tensors, found, True), *settings, "triton", more)
    expected = op.gradients(*of_outputs, *op.kept(exact, wanted, True), *settings, "plain", more)
    for got, want in zip([*found[:2], *gradients], [*wanted[:2], *expected], strict=True):
        assert got is None if want is None else torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4)
