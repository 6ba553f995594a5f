from dataclasses import replace
from typing import Any

import pytest
import torch

from fullstride.jvp.attention import naive
from fullstride.jvp.attention.naive_varlen import backward_varlen, forward_varlen
from tests.jvp.attention.math_form import Case, draw

LENGTHS_Q, LENGTHS_K = (5, 0, 9, 3), (7, 4, 0, 3)
OPTIONS = {"plain": {}, "causal": {"causal": True}, "window": {"window": (2, 1)}}


def packed(x: torch.Tensor | None) -> Any:
    """The one batch entry as (T, H, D)."""
    return None if x is None else x[0].transpose(0, 1).contiguous()


def starts(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def block_mask(lengths_q, lengths_k) -> torch.Tensor:
    sequence_q, sequence_k = (torch.arange(4).repeat_interleave(torch.tensor(x)) for x in (lengths_q, lengths_k))
    return sequence_q[:, None] == sequence_k


def whole_with_block_mask(seed: int, **kwargs) -> Case:
    case = draw(seed, b=1, h=4, hk=2, lq=sum(LENGTHS_Q), lk=sum(LENGTHS_K), dv=24, **kwargs)
    return replace(case, mask=block_mask(LENGTHS_Q, LENGTHS_K).expand(1, 4, -1, -1))


def banded(case: Case, causal: bool = False, window: tuple[int, int] | None = None) -> Case:
    """The case whose mask also holds each sequence's own band, counted from its start."""
    inside_q, inside_k = (torch.cat([torch.arange(n) for n in x]) for x in (LENGTHS_Q, LENGTHS_K))
    offset = inside_k - inside_q[:, None]
    seen = torch.ones_like(offset, dtype=torch.bool) if not causal else offset <= 0
    if window is not None:
        seen &= (offset >= -window[0]) & (offset <= window[1])
    return replace(case, mask=case.mask & seen)


@pytest.mark.parametrize("absent", ["", "tq tk", "tv", "tq tk tv"])
@pytest.mark.parametrize("options", OPTIONS)
def test_packed_sequences_are_one_with_a_block_mask(options, absent, seed):
    chosen: dict[str, Any] = OPTIONS[options]
    case = banded(whole_with_block_mask(seed, absent=absent), **chosen)
    inputs, cu = [packed(x) for x in case.inputs], (starts(LENGTHS_Q), starts(LENGTHS_K))
    o, to, lse, mu = naive.forward(*case.inputs, **case.options)
    arguments: Any = *inputs, *cu
    found = forward_varlen(*arguments, scale=case.scale, **chosen)
    for f, e in zip(found, (packed(o), packed(to), lse[0], None if mu is None else mu[0]), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-12)
    go, gto = torch.randn(2, *o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    gto = None if to is None else gto
    gradients = naive.backward(go, gto, *case.inputs, o, to, lse, mu, **case.options)
    arguments = packed(go), packed(gto), *inputs, *found, *cu
    got = backward_varlen(*arguments, scale=case.scale, **chosen)
    for f, e in zip(got, gradients, strict=True):
        torch.testing.assert_close(f, packed(e), rtol=1e-12, atol=1e-12)
