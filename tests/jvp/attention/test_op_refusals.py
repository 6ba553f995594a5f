import inspect
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

from fullstride.jvp import attention, attention_dual, jvp
from fullstride.jvp.attention import arguments
from tests.jvp.attention.cases import draw
from tests.jvp.derivatives import dual_level, ours, torchs

Q, K = torch.ones(2, 4, 5, 8), torch.ones(2, 2, 7, 8)
WRONG: dict[str, tuple[tuple, dict[str, Any], str]] = {
    "heads": ((Q, K, K), {}, r"q has 4 heads and k 2, expected the same number, or enable_gqa=True"),
    "multiple": ((Q[:, :3], K, K), {"enable_gqa": True}, r"q has 3 heads and k 2, expected .* a multiple"),
    "width": ((Q[:, :2, :, :6], K, K), {}, r"q \(2, 2, 5, 6\), .* expected equal head dims of q and k"),
    "values": ((Q[:, :2], K, K[:, :, 1:]), {}, r"v \(2, 2, 6, 8\), .* as many values as keys"),
    "batch": ((Q[:1, :2], K, K), {}, r"q \(1, 2, 5, 8\), .* expected \(B, H, L, D\) with one batch size"),
    "dimensions": ((Q[0, :2], K[0], K[0]), {}, r"q \(2, 5, 8\), .* expected \(B, H, L, D\)"),
    "dtypes": (
        (Q[:, :2], K.double(), K),
        {},
        r"are torch.float32 on cpu, torch.float64 on cpu, .* one floating",
    ),
    "integers": ((Q.long(), Q.long(), Q.long()), {}, "expected one floating dtype"),
    "both masks": (
        (Q, Q, Q),
        {"attn_mask": Q[0, 0, :, :5] > 0, "is_causal": True},
        "put the causal triangle into",
    ),
    "mask's shape": (
        (Q, Q, Q),
        {"attn_mask": Q[0, 0] > 0},
        r"attn_mask is \(5, 8\), .* broadcasts to \(2, 4, 5, 5\)",
    ),
    "mask's dtype": (
        (Q, Q, Q),
        {"attn_mask": torch.ones(5, 5).int()},
        "attn_mask is torch.int32 on cpu, expect",
    ),
    "precision": ((Q, Q, Q), {"precision": "bf16"}, "precision is 'bf16', expected one of ieee, tf32, tf32x3"),
    "implementation": (
        (Q, Q, Q),
        {"implementation": "flash"},
        "implementation is 'flash', expected one of auto",
    ),
    "triton": (
        (Q, Q, Q),
        {"implementation": "triton"},
        "expected fp32, fp16 or bf16 on an NVIDIA GPU from sm_80 on",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name):
    args, options, message = WRONG[name]
    plain = inspect.unwrap(attention)
    if args[0].is_floating_point():
        with pytest.raises(ValueError, match=message):
            jvp(lambda q: plain(q, *args[1:], **options), (args[0],), (args[0],))
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(attention_dual)(*args, args[0], **options)


def test_a_precision_is_looked_at_without_a_tangent_too(seed):
    q, k, v = draw(seed, "self")
    with pytest.raises(ValueError, match="precision is 'tf23', expected one of ieee, tf32, tf32x3"):
        attention(q, k, v, precision="tf23")
    torch.testing.assert_close(attention(q, k, v, precision="ieee"), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("window", [3, (1, 2, 3), (1.5, 2)])
def test_a_window_of_another_form_is_refused(window):
    with pytest.raises(ValueError, match=f"window is {re.escape(repr(window))}, expected \\(left, right\\)"):
        inspect.unwrap(arguments.checked_window)(window)


def test_a_mask_that_learns_is_a_constant_without_gradients(seed):
    q, k, v = draw(seed, "self")
    mask = (q[0, 0] @ q[0, 0].mT).requires_grad_()
    with torch.no_grad():
        found, expected = (
            jvp(lambda q, m=m: attention(q, k, v, attn_mask=m), (q,), (k,)) for m in (mask, mask.detach())
        )
    assert all(map(torch.equal, found, expected))


def test_a_second_backward_pass_is_refused(seed):
    primals, tangents = ([x.requires_grad_() for x in draw(s, "self")] for s in (seed, seed + 10))
    _, to = ours(attention, primals, tangents)
    (first,) = torch.autograd.grad(to.sin().sum(), primals[:1], create_graph=True)
    with pytest.raises(
        RuntimeError, match="a second derivative .* fullstride's attention, which has only a first one; use PyTorch"
    ):
        torch.autograd.grad(first.sum(), primals[:1])
    with pytest.raises(RuntimeError, match="a second derivative by backward passes"):
        grad(lambda q: grad(lambda q: torchs(attention, [q, *primals[1:]], tangents)[1].sin().sum())(q).sum())(
            primals[0]
        )


def test_a_backward_pass_inside_a_dual_level_is_refused(seed):
    primals, tangents = ([x.requires_grad_() for x in draw(s, "self")] for s in (seed, seed + 10))
    inside = lambda *x: torch.autograd.grad(attention(*x).sum(), x, create_graph=True)[0]  # noqa: E731
    with pytest.raises(RuntimeError, match="a backward pass of fullstride's attention inside a dual level: .* after"):
        dual_level(inside, primals, tangents)
