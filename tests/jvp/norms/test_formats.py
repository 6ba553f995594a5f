"""Results in another format than x's."""

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from fullstride.jvp import ada_layer_norm, group_norm, jvp, layer_norm, rms_norm
from fullstride.jvp.norms import group_norm as group_kernels
from fullstride.jvp.norms import naive, rows
from tests.jvp.norms.cases import Case, reference_dual, reference_gradients, relative_error

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter's
]

CASES = [
    Case("layer_norm", (5, 48)),
    Case("rms_norm", (5, 37)),
    Case("ada_layer_norm", (2, 3, 40)),
    Case("group_norm", (2, 6, 5, 7), 3, "silu"),
    Case("group_norm", (2, 8, 4, 4), 2, None, True),
]
OPS = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "ada_layer_norm": ada_layer_norm,
    "group_norm": functools.partial(group_norm, groups=3, act="silu"),
}
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def calls(name: str, seed: int) -> tuple:
    """A public op and its primals and tangents in bf16 (x) and fp32 (parameters)."""
    inputs = next(case for case in CASES if case.op == name).draw(seed, torch.float32)
    primals, tangents = ([t for t in part if t is not None] for part in (inputs.primals, inputs.tangents))
    half = [x[0].bfloat16() for x in (primals, tangents)]
    op = OPS[name]
    return lambda x, *p, **how: op(x=x, **dict(zip(NAMES[name], p, strict=True)), **how), (
        [half[0], *primals[1:]],
        [half[1], *tangents[1:]],
    )


NAMES = {
    "layer_norm": ("weight", "bias"),
    "rms_norm": ("weight",),
    "ada_layer_norm": ("scale", "shift"),
    "group_norm": ("weight", "bias"),
}


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16], ids=str)
def test_gradients_of_results_in_another_format(case, given, fused, detached, seed):
    """fp16 of fp32 and fp32 of fp16, their gradients in the results' format: all against fp64."""
    wanted = torch.float16 if given == torch.float32 else torch.float32
    module = naive if not fused else group_kernels if case.op == "group_norm" else rows
    drawn = case.draw(seed, torch.float16)
    inputs = drawn.to(torch.float32)
    if given == torch.float16:
        inputs = dataclasses.replace(inputs, x=drawn.x, tx=drawn.tx)
    else:
        inputs = dataclasses.replace(inputs, gy=drawn.gy, gty=drawn.gty)
    exact = inputs.to(torch.float64)
    y, ty, *moments = inputs.forward(module, dtype=wanted)
    assert y.dtype == ty.dtype == wanted
    assert y.stride() == ty.stride() == inputs.x.stride()
    found = inputs.backward(module, moments, detached)
    expected = (*reference_dual(exact), *reference_gradients(exact, detached))
    for got, want in zip((y, ty, *found), expected, strict=True):
        if got is not None:
            assert relative_error(got, want) < TOLERANCE[got.dtype]
    assert found[0].dtype == given


@pytest.mark.parametrize("name", OPS)
def test_it_is_that_of_full_precision_rounded_once(name, seed):
    op, (primals, tangents) = calls(name, seed)
    full = lambda *p: op(*(x.float() for x in p))  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16):
        found = jvp(functools.partial(op, dtype=torch.bfloat16), tuple(primals), tuple(tangents))
        without = op(*primals, dtype=torch.bfloat16)
    expected = jvp(full, tuple(primals), tuple(tangents))
    for x, exact in zip(found[:2], expected[:2], strict=True):
        assert x.dtype == torch.bfloat16
        # Another order of the same sums may round the last bit of fp32 otherwise, and one in 2^16 of those in bf16.
        torch.testing.assert_close(x.float(), exact.to(torch.bfloat16).float(), rtol=2**-8, atol=1e-6)
        assert (x.float() != exact.to(torch.bfloat16).float()).float().mean() < 0.02
    assert without.dtype == torch.bfloat16
    assert relative_error(without, expected[0].double()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", OPS)
def test_gradients_under_autocast_come_back_in_the_inputs_formats(name, seed):
    op, (primals, tangents) = calls(name, seed)
    leaves = [x.requires_grad_() for x in primals]
    with torch.autocast("cpu", torch.bfloat16):
        y, ty, *_ = jvp(functools.partial(op, dtype=torch.bfloat16), tuple(leaves), tuple(tangents), tangent_grad=True)
    found = torch.autograd.grad((y.float() ** 2 + ty.float() * y.float()).sum(), leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    u, tu, *_ = torch.func.jvp(by_hand(name), tuple(exact), tuple(t.double() for t in tangents))
    expected = torch.autograd.grad((u**2 + tu * u).sum(), exact)
    for got, want, leaf in zip(found, expected, leaves, strict=True):
        assert got.dtype == leaf.dtype
        assert relative_error(got, want) < 0.02


def by_hand(name: str):
    def run(x: Tensor, *p: Tensor) -> Tensor:
        if name == "rms_norm":
            step = torch.finfo(torch.float32).eps
            return x / (x.square().mean(-1, keepdim=True) + step).sqrt() * p[0]
        if name == "group_norm":
            g = x.reshape(x.shape[0], 3, -1)
            g = (g - g.mean(-1, keepdim=True)) / (g.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
            u = g.reshape(x.shape) * p[0][:, None, None] + p[1][:, None, None]
            return u * torch.sigmoid(u)
        eps = 1e-6 if name == "ada_layer_norm" else 1e-5
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
        w, b = (1 + p[0][:, None], p[1][:, None]) if name == "ada_layer_norm" else p
        return y * w + b

    return run


def test_only_float_formats(seed):
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(seed))
    with pytest.raises(ValueError, match="dtype is torch.int32, expected a floating dtype"):
        layer_norm(x, dtype=torch.int32)
