"""Calling forms of other JVP attentions against the definition in fp64."""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jvp

from fullstride import jvp as ours
from fullstride.jvp import compat
from tests.jvp import plain_ops
from tests.jvp.attention.rules import draw
from tests.jvp.derivatives import close, torchs


def points(seed: int, lq: int = 7, lk: int = 5) -> tuple[list[Tensor], list[Tensor]]:
    return draw(seed, lq, lk), draw(seed + 10, lq, lk)


def test_sdpa_jvp_with_and_without_a_tangent(seed):
    primals, tangents = points(seed)
    expected = torchs(plain_ops.attention, primals, tangents)
    q, k, v = primals
    close(compat.sdpa_jvp(q, k, v), expected[0])
    for way in (jvp, ours.jvp):
        close(tuple(way(compat.sdpa_jvp, tuple(primals), tuple(tangents))), expected)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sm_scale": 0.3, "USE_TMA": False}, {"attn_mask": "some"}])
def test_jvp_flash_attentions_forms(options, seed):
    primals, tangents = points(seed)
    if "attn_mask" in options:
        options = {"attn_mask": torch.arange(35).reshape(7, 5) % 3 > 0}
    names = {"causal": "is_causal", "sm_scale": "scale", "attn_mask": "attn_mask"}
    reference = functools.partial(plain_ops.attention, **{names[n]: x for n, x in options.items() if n in names})
    expected = torchs(reference, primals, tangents)
    of_apply = lambda *x: compat.JVPAttn.apply(*x, *tangents, **options).o  # noqa: E731
    for form in (compat.jvp_attention, compat.JVPAttn.fwd_dual, of_apply):
        close(
            tuple(
                ours.jvp(
                    functools.partial(form, **({} if form is of_apply else options)), tuple(primals), tuple(tangents)
                )
            ),
            expected,
        )
    alone: Any = compat.JVPAttn.fwd
    close(alone(*primals, **options), expected[0])


def test_rcms_forms(seed):
    primals, tangents = points(seed)
    expected = torchs(plain_ops.attention, primals, tangents)
    of_pairs: Any = compat.attention_with_tangent
    close(of_pairs(*primals, *tangents), expected)
    causal = torchs(functools.partial(plain_ops.attention, is_causal=True, scale=0.7), primals, tangents)
    close(of_pairs(*primals, *tangents, causal=True, sm_scale=0.7), causal)
    rows = [x.transpose(1, 2) for x in (*primals, *tangents)]
    for shape in ((7,), (7, 1)):
        pairs = [
            (x.unflatten(1, s), t.unflatten(1, s))
            for x, t, s in zip(rows[:3], rows[3:], (shape, (5,), (5,)), strict=True)
        ]
        found = compat.torch_attention_op_withT(*pairs)
        close(found, tuple(x.transpose(1, 2).unflatten(1, shape) for x in expected))


def test_gradients_reach_the_primals_and_past_the_tangent(seed):
    primals, tangents = points(seed)
    leaves = [x.requires_grad_() for x in primals]
    of_pairs: Any = compat.attention_with_tangent
    o, to = of_pairs(*leaves, *tangents)
    assert to is not None
    assert not to.requires_grad
    expected = torch.autograd.grad(plain_ops.attention(*leaves).sin().sum(), leaves)
    close(torch.autograd.grad(o.sin().sum(), leaves), expected)


def test_what_they_take_and_attention_does_not_is_refused(seed):
    (q, k, v), (tq, *_) = points(seed)
    for form in (compat.JVPAttn.fwd_dual, compat.jvp_attention):
        with pytest.raises(ValueError, match="dropout_p is 0.1, expected 0: .* implementation='plain'"):
            form(q, k, v, None, 0.1)
    with pytest.raises(ValueError, match="q_t is given and q carries no tangent, which would be lost"):
        compat.JVPAttn.apply(q, k, v, tq)
    with pytest.raises(ValueError, match="magi_mask is given"):
        inspect.unwrap(compat.attention_with_tangent)(q, k, v, tq, None, None, magi_mask=object())
