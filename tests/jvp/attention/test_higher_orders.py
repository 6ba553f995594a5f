"""Derivatives of higher order of `implementation="plain"`, against those of torch's math attention in fp64."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullstride import jvp as ours
from fullstride.jvp import attention, attention_dual, attention_varlen
from tests.jvp import plain_ops
from tests.jvp.derivatives import close

# b, h, hk, lq, lk, d, dv
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "self": ((2, 3, 3, 7, 7, 5, 5), {}),
    "cross": ((1, 2, 2, 5, 11, 6, 3), {"scale": 0.7}),
    "causal": ((2, 1, 1, 9, 9, 4, 7), {"is_causal": True}),
    "causal_cross": ((1, 2, 2, 3, 8, 4, 4), {"is_causal": True}),
    "gqa": ((1, 6, 2, 5, 7, 4, 5), {"enable_gqa": True}),
    "bool": ((2, 2, 2, 5, 7, 3, 3), {"attn_mask": "bool"}),
    "additive": ((2, 2, 2, 5, 7, 3, 4), {"attn_mask": "additive"}),
    "gqa_causal": ((1, 4, 1, 7, 5, 3, 3), {"enable_gqa": True, "is_causal": True}),
}


def case(name: str, seed: int) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    """The plain form, torch's, primals, and tangents."""
    (b, h, hk, lq, lk, d, dv), options = CASES[name]
    g = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=g, dtype=torch.float64)
    if "attn_mask" in options:
        hidden = torch.rand(b, 1, lq, lk, generator=g) < 0.4
        hidden[..., 0] = False
        added = draw(h, lq, lk).masked_fill(hidden, -torch.inf)
        options = options | {"attn_mask": ~hidden if options["attn_mask"] == "bool" else added}
    primals, tangents = ([draw(b, h, lq, d), draw(b, hk, lk, d), draw(b, hk, lk, dv)] for _ in range(2))
    plain = functools.partial(attention, implementation="plain", **options)
    return plain, functools.partial(F.scaled_dot_product_attention, **options), primals, tangents


def scalar(op: Any) -> Any:
    return lambda *x: op(*x).sin().sum()


def pushed(op: Any, tangents: list[Tensor]) -> Any:
    return lambda *x: jvp(op, tuple(x), tuple(tangents))[1]


def both(name: str, seed: int, transform: Any) -> None:
    """Compare a transform of the plain form with the same of torch's math attention."""
    plain, math, primals, tangents = case(name, seed)
    with sdpa_kernel(SDPBackend.MATH):
        expected = transform(math, tangents)(*primals)
    close(transform(plain, tangents)(*primals), expected)


EVERY = (0, 1, 2)
TRANSFORMS = {
    "jvp of grad": lambda f, t: pushed(grad(scalar(f), argnums=EVERY), t),
    "grad of jvp": lambda f, t: grad(scalar(pushed(f, t)), argnums=EVERY),
    "jvp of jvp": lambda f, t: pushed(pushed(f, t), [x.cos() for x in t]),
    "grad of grad": lambda f, t: grad(lambda *x: grad(scalar(f))(*x).sin().sum(), argnums=EVERY),
    "jvp of jvp of grad": lambda f, t: pushed(pushed(grad(scalar(f)), t), [x.cos() for x in t]),
    "grad of jvp of grad": lambda f, t: grad(lambda *x: pushed(grad(scalar(f)), t)(*x).sin().sum(), argnums=EVERY),
    "jvp of vmap": lambda f, t: pushed(lambda *x: vmap(f)(*(torch.stack([y, y.cos()]) for y in x)), t),
    "vmap of jvp of grad": lambda f, t: (
        lambda *x: vmap(lambda s: pushed(grad(scalar(f)), [s * y for y in t])(*x))(
            torch.arange(1.0, 4.0, dtype=torch.float64)
        )
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CASES)
def test_transforms_of_the_plain_form(name, transform, seed):
    both(name, seed, TRANSFORMS[transform])


@pytest.mark.parametrize("name", ["self", "gqa", "bool"])
def test_hessians(name):
    plain, math, (q, k, v), _ = case(name, 0)
    of_q = lambda f: hessian(lambda q: scalar(f)(q, k, v))(q)  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        expected = of_q(math)
    close(of_q(plain), expected)


def second_backward(f: Any, primals: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in primals]
    first = torch.autograd.grad(scalar(f)(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(torch.stack([x.sin().sum() for x in first]).sum(), leaves)


@pytest.mark.parametrize("name", CASES)
def test_two_backward_passes(name, seed):
    plain, math, primals, _ = case(name, seed)
    with sdpa_kernel(SDPBackend.MATH):
        expected = second_backward(math, primals)
    close(second_backward(plain, primals), expected)


def test_the_librarys_own_jvp_of_a_gradient(seed):
    plain, math, primals, tangents = case("causal", seed)
    with sdpa_kernel(SDPBackend.MATH):
        expected = jvp(grad(scalar(math)), tuple(primals), tuple(tangents))
    for through in (False, True):
        close(ours.jvp(grad(scalar(plain)), tuple(primals), tuple(tangents), tangent_grad=through), expected)
    twice = lambda *x: ours.jvp(plain, x, tuple(tangents), tangent_grad=True)[1]  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        expected = pushed(pushed(math, tangents), tangents)(*primals)
    close(ours.jvp(twice, tuple(primals), tuple(tangents), tangent_grad=True)[1], expected)


@pytest.mark.parametrize("name", CASES)
def test_explicit_pairs_are_differentiated_twice(name, seed):
    plain, math, primals, tangents = case(name, seed)
    pair: Any = functools.partial(attention_dual, **plain.keywords)
    points = [*primals, *tangents]
    of_pair = lambda *x: pair(*x)[1]  # noqa: E731
    of_math = lambda *x: jvp(math, x[:3], x[3:])[1]  # noqa: E731
    along = [x.sin() for x in points]
    with sdpa_kernel(SDPBackend.MATH):
        expected = second_backward(of_math, points), pushed(of_math, along)(*points)
    close((second_backward(of_pair, points), pushed(of_pair, along)(*points)), expected)


def test_packed_sequences_are_differentiated_twice(seed):
    g = torch.Generator().manual_seed(seed)
    q, k, v, t = (torch.randn(n, 4, 5, generator=g, dtype=torch.float64) for n in (9, 11, 11, 9))
    k, v = k[:, :2], v[:, :2]
    at_q, at_k = ([0, 3, 3, 8, 9], [0, 4, 6, 6, 11])
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in (at_q, at_k))
    options: dict[str, Any] = {"enable_gqa": True, "window": (3, 1)}

    def packed(q: Tensor) -> Tensor:
        return attention_varlen(q, k, v, starts_q, starts_k, 5, 5, **options, implementation="plain")

    def each(q: Tensor) -> Tensor:
        parts = []
        for i in range(4):
            of_q, of_k = slice(at_q[i], at_q[i + 1]), slice(at_k[i], at_k[i + 1])
            heads = (x[at].transpose(0, 1)[None] for x, at in ((q, of_q), (k, of_k), (v, of_k)))
            parts.append(plain_ops.attention(*heads, **options)[0].transpose(0, 1))
        return torch.cat(parts)

    for transform in (lambda f: f, lambda f: pushed(grad(scalar(f)), [t]), lambda f: pushed(pushed(f, [t]), [t])):
        close(transform(packed)(q), transform(each)(q))


FUSED = {
    "jvp of grad": TRANSFORMS["jvp of grad"],
    "jvp of jvp": TRANSFORMS["jvp of jvp"],
    "jvp of vmap": TRANSFORMS["jvp of vmap"],
    "two backward passes": lambda f, t: lambda *x: second_backward(pushed(f, t), list(x)),
}


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_form_names_the_plain_one(name):
    _, _, primals, tangents = case("self", 0)
    with pytest.raises(RuntimeError, match="attention with implementation='plain'"):
        FUSED[name](attention, tangents)(*primals)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_formats_and_layouts_are_kept(dtype, seed):
    plain, _, primals, tangents = case("gqa", seed)
    laid = [x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in primals]
    for out in jvp(plain, tuple(laid), tuple(x.to(dtype) for x in tangents)):
        assert out.dtype == dtype
        assert out.transpose(1, 2).is_contiguous()
    with torch.autocast("cpu", torch.bfloat16):
        assert plain(*(x.float() for x in primals)).dtype == torch.bfloat16
