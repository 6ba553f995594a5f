import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.func import grad, jacfwd, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride.jvp import attention, attention_dual, jvp
from tests.jvp import plain_ops
from tests.jvp.attention.cases import CASES, SIZES, draw, op_and_reference, weights_for
from tests.jvp.attention.math_form import transposed
from tests.jvp.derivatives import (
    check_backward,
    check_forward,
    check_transforms,
    close,
    detached,
    dual_level,
    ours,
    torchs,
    with_zeros,
)


@pytest.mark.parametrize("name", CASES)
def test_output_and_tangent_by_every_way(name, seed):
    op, reference, size = op_and_reference(name, seed)
    check_forward(op, reference, draw(seed, size), draw(seed + 10, size))


@pytest.mark.parametrize("name", CASES)
def test_gradients_by_every_way(name, seed):
    op, reference, size = op_and_reference(name, seed)
    primals = draw(seed, size)
    check_backward(op, reference, primals, draw(seed + 10, size), weights_for(seed, reference, primals))


@pytest.mark.parametrize("name", ["plain", "gqa", "bool_heads_gqa", "additive_full", "window_causal"])
def test_transforms_of_its_derivative(name):
    op, reference, size = op_and_reference(name, 0)
    check_transforms(op, reference, draw(0, size), draw(10, size, stack=3), 3)


@pytest.mark.parametrize("absent", ["q", "k", "v", "qk", "qv", "kv"])
@pytest.mark.parametrize("name", ["plain", "gqa", "bool_full", "window_causal"])
def test_absent_tangents_are_zero(name, absent, seed):
    op, reference, size = op_and_reference(name, seed)
    primals = draw(seed, size)
    tangents = [None if n in absent else t for n, t in zip("qkv", draw(seed + 10, size), strict=True)]
    check_forward(op, reference, primals, tangents)
    check_backward(op, reference, primals, tangents, weights_for(seed, reference, primals))
    expected = torchs(reference, primals, with_zeros(primals, tangents))
    close(ours(op, primals, with_zeros(primals, tangents)), expected)
    close(attention_dual(*primals, *tangents, **op.keywords), expected)


class Products(TorchDispatchMode):
    """Mode that counts batched matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "bmm" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("absent", "products"), [("", 6), ("kv", 4), ("qk", 3), ("v", 5), ("qv", 4), ("q", 5)])
def test_absent_tangents_leave_their_products_out(absent, products):
    tangents = [None if n in absent else t for n, t in zip("qkv", draw(1, "self"), strict=True)]
    with Products() as counted:
        jvp(attention, tuple(draw(0, "self")), tuple(tangents))
    assert counted.count == products


@pytest.mark.parametrize("name", [n for n, (_, options) in CASES.items() if "window" not in options])
def test_without_a_tangent_it_is_the_librarys(name, seed):
    op, _, size = op_and_reference(name, seed)
    q, k, v = draw(seed, size)
    library = F.scaled_dot_product_attention(q, k, v, **op.keywords)
    assert torch.equal(op(q, k, v), library)
    _, dudt, aux = jvp(lambda x: (x * 2, op(q, k, v)), (q,), (q,), has_aux=True)
    assert torch.equal(aux, library)
    assert torch.equal(dudt, 2 * q)


@pytest.mark.parametrize("name", CASES)
def test_without_a_tangent_the_plain_form_is_the_same(name, seed):
    op, reference, size = op_and_reference(name, seed)
    q, k, v = (x.requires_grad_() for x in draw(seed, size))
    found, expected = op(q, k, v, implementation="plain"), reference(q, k, v)
    close(found, expected)
    pairs = (torch.autograd.grad(o.sin().sum(), (q, k, v)) for o in (found, expected))
    close(*pairs)
    o, to = attention_dual(q, k, v, **op.keywords)
    close(o, expected)
    assert to is None


def test_a_query_that_sees_nothing_gives_zeros_and_takes_none(seed):
    op, _, size = op_and_reference("additive_full", seed)
    primals, tangents = ([x.requires_grad_() for x in draw(s, size)] for s in (seed, seed + 10))
    o, to = ours(op, primals, tangents)
    blind = SIZES[size][3] // 2
    assert not o[:, :, blind].any()
    assert not to[:, :, blind].any()
    for g in torch.autograd.grad(o.sum() + to.sum(), [*primals, *tangents]):
        assert g.isfinite().all()
        assert g.any()


def test_a_transposed_view_keeps_its_layout(seed):
    primals, tangents = (draw(s, "cross", layout=transposed) for s in (seed, seed + 10))
    assert primals[0].stride(1) < primals[0].stride(2)
    expected = torchs(plain_ops.attention, primals, tangents)
    for way in (ours, torchs, dual_level, detached):
        o, to = way(attention, primals, tangents)
        close((o, to), expected)
        assert o.transpose(1, 2).is_contiguous()
        assert to.transpose(1, 2).is_contiguous()


def test_jacobians(seed):
    q, k, v = draw(seed, "one")
    for op in (attention, functools.partial(attention, window=(1, 1))):
        reference = functools.partial(plain_ops.attention, **getattr(op, "keywords", {}))
        close(jacfwd(op, argnums=(0, 1, 2))(q, k, v), jacfwd(reference, argnums=(0, 1, 2))(q, k, v))
    slope = lambda f: lambda q: torch.func.jvp(lambda q: f(q, k, v), (q,), (q.sin(),))[1]  # noqa: E731
    close(jacrev(slope(attention))(q), jacrev(slope(plain_ops.attention))(q))


@pytest.mark.parametrize("name", ["causal_cross", "mqa_causal", "additive_matrix", "window"])
def test_gradcheck_forward_and_reverse(name):
    op, _, size = op_and_reference(name, 0)
    primals = tuple(x.requires_grad_() for x in draw(0, size))
    op = functools.partial(op, implementation="plain")
    assert gradcheck(op, primals, fast_mode=True, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("name", ["plain", "gqa", "bool_full", "window_causal"])
def test_gradcheck_through_the_tangent(name):
    op, _, size = op_and_reference(name, 0)
    points = tuple(x.requires_grad_() for x in (*draw(0, size), *draw(10, size)))
    pair: Any = functools.partial(attention_dual, **op.keywords)
    assert gradcheck(pair, points, fast_mode=True)
    assert gradcheck(lambda *x: jvp(op, x[:3], x[3:], tangent_grad=True), points, fast_mode=True)


def test_a_pair_without_gradient_of_its_tangent(seed):
    primals, tangents = ([x.requires_grad_() for x in draw(s, "gqa")] for s in (seed, seed + 10))
    o, to = attention_dual(*primals, *tangents, enable_gqa=True, tangent_grad=False)
    close((o, to), torchs(functools.partial(plain_ops.attention, enable_gqa=True), primals, tangents))
    assert o.requires_grad
    assert to is not None
    assert not to.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_errors_are_no_larger_than_eagers_in_the_same_dtype(dtype, seed):
    primals, tangents = ([x.to(dtype) for x in draw(s, "cross")] for s in (seed, seed + 10))
    exact = torchs(plain_ops.attention, [x.double() for x in primals], [x.double() for x in tangents])
    with sdpa_kernel(SDPBackend.MATH):
        eager = torchs(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), primals, tangents)
    for found, by_eager, expected in zip(ours(attention, primals, tangents), eager, exact, strict=True):
        assert found.dtype == dtype
        error, eagers = ((x.double() - expected).norm() / expected.norm() for x in (found, by_eager))
        assert error < max(2 * eagers, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_autocast_is_that_of_the_library(dtype, seed):
    primals, tangents = ([x.to(dtype).requires_grad_() for x in draw(s, "self")] for s in (seed, seed + 10))
    exact = torchs(plain_ops.attention, [x.double() for x in primals], [x.double() for x in tangents])
    with torch.autocast("cpu", torch.bfloat16):
        library = F.scaled_dot_product_attention(primals[0], primals[1], primals[2])
        found = [way(attention, primals, tangents) for way in (ours, torchs, dual_level, detached)]
    for o, to in found:
        assert o.dtype == to.dtype == library.dtype
        for x, expected in zip((o, to), exact, strict=True):
            assert (x.double() - expected).norm() < 0.02 * expected.norm()
    (g,) = torch.autograd.grad(found[0][1].float().sum(), primals[:1])
    expected = grad(lambda q: torchs(plain_ops.attention, [q, *primals[1:]], tangents)[1].sum())(primals[0])
    assert g.dtype == dtype
    assert (g - expected).norm() < 0.05 * expected.norm()


def test_pairs_are_cast_as_duals_are(seed):
    q, k, v, *tangents = (x.float() for x in torch.randn(6, 1, 2, 5, 8, generator=torch.Generator().manual_seed(seed)))
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_dual(q, k, v, tangents[0], None, tangents[2])
        duals = jvp(attention, (q, k, v), (tangents[0], None, tangents[2]))
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found, tuple(duals))
