from dataclasses import replace
from typing import Any

import pytest
import torch

from fullstride.jvp.attention.naive import backward, forward
from tests.jvp.attention.math_form import Case, draw, expected_backward, expected_forward, transposed

CASES = {
    "plain": {},
    "cross": {"lq": 13, "lk": 29, "dv": 24},
    "one": {"lq": 1, "lk": 1},
    "gqa": {"h": 6, "hk": 2},
    "mqa_causal": {"h": 3, "hk": 1, "causal": True},
    "bool": {"mask": "bool"},
    "heads_gqa": {"mask": "heads", "h": 4, "hk": 2, "lk": 41},
    "additive": {"mask": "additive", "causal": True},
    "causal_tall": {"causal": True, "lq": 41, "lk": 17},
    "window": {"window": (5, 3)},
    "window_left": {"window": (4, -1), "causal": True, "lq": 17, "lk": 43},
    "window_beyond": {"window": (2, 0), "lq": 43, "lk": 17},
    "transposed": {"layout": transposed, "hk": 2, "mask": "bool"},
    "only_tq": {"absent": "tk tv"},
    "only_tk": {"absent": "tq tv", "mask": "bool"},
    "only_tv": {"absent": "tq tk", "hk": 1},
    "no_tv": {"absent": "tv"},
    "no_tq": {"absent": "tq"},
}


def close(found, expected):
    """Compare within 1e-12 of the largest entry: a thousand roundings of fp64."""
    assert (found is None) == (expected is None)
    if found is not None:
        assert (found - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1.0)


def run(case: Case) -> tuple[Any, ...]:
    return forward(*case.inputs, **case.options)


def outputs(case: Case, seed: int) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
    o, to, lse, mu = run(case)
    g = torch.Generator().manual_seed(seed + 100)
    go, gto = torch.randn(2, *o.shape, generator=g, dtype=torch.float64).to(o.dtype)
    return (go, gto), (o, to, lse, mu)


@pytest.mark.parametrize("name", CASES)
def test_forward_is_torchs_own_derivative(name, seed):
    case = draw(seed, **CASES[name])
    o, to, _, _ = run(case)
    for found, expected in zip((o, to), expected_forward(case), strict=True):
        close(found, expected)
        assert expected.abs().max() > 0.1


@pytest.mark.parametrize("detached", [False, True], ids=["through", "detached"])
@pytest.mark.parametrize("name", CASES)
def test_backward_is_torchs_own_gradient(name, detached, seed):
    case = draw(seed, **CASES[name])
    (go, gto), saved = outputs(case, seed)
    gto = None if detached else gto
    found = backward(go, gto, *case.inputs, *saved, **case.options)
    expected = expected_backward(case, go, gto)
    for x, f, e in zip(case.inputs, found, expected, strict=True):
        close(f, e)
        assert f is None or (f.stride() == x.stride() and f.abs().max() > (0.1 if x.shape[2] > 1 else -1))


def test_statistics_are_the_scores(seed):
    case = draw(seed, mask="additive", hk=2)
    _, _, lse, mu = run(case)
    group = [x.repeat_interleave(2, 1).mT for x in (case.k, case.tk)]
    s: Any = case.scale * case.q @ group[0] + case.mask
    ts = case.scale * (case.tq @ group[0] + case.q @ group[1])
    seen = s.logsumexp(-1) > -torch.inf
    close(lse[seen], s.logsumexp(-1)[seen])
    close(mu[seen], (torch.softmax(s, -1) * ts).sum(-1)[seen])
    assert torch.equal(lse == -torch.inf, ~seen)
    assert (mu[~seen] == 0).all()
    assert (~seen).any()


@pytest.mark.parametrize("layout", [torch.clone, transposed])
def test_without_tangents_it_is_attention(layout, seed):
    case = draw(seed, absent="tq tk tv", hk=2, layout=layout)
    o, to, lse, mu = run(case)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    close(o, sdpa(case.q, case.k, case.v, scale=case.scale, enable_gqa=True))
    assert (to, mu) == (None, None)
    assert o.stride() == case.q.stride()
    assert lse.shape == case.q.shape[:3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_only_where_it_is_stored(dtype, seed):
    case = draw(seed, lq=65, layout=transposed).to(dtype)
    (go, gto), saved = outputs(case, seed)
    o, to, lse, mu = saved
    exact = case.to(torch.float64)
    assert lse.dtype == mu.dtype == torch.float32
    pairs: list[Any] = [*zip((o, to), expected_forward(exact), strict=True)]
    found = backward(go, gto, *case.inputs, *saved, **case.options)
    pairs += zip(found, expected_backward(exact, go.double(), gto.double()), strict=True)
    # Storing rounds by half an eps of each entry; o and to were rounded too before they entered a row's sum.
    for f, e in pairs:
        assert f.dtype == dtype
        assert (f.double() - e).norm() < max(2 * torch.finfo(dtype).eps, 2e-6) * e.norm()


def test_a_row_without_keys_gives_and_takes_nothing(seed):
    case = draw(seed, mask="bool")
    (go, gto), saved = outputs(case, seed)
    found: tuple[Any, ...] = backward(go, gto, *case.inputs, *saved, **case.options)
    for x in (*saved[:2], found[0], found[3]):
        assert (x[:, :, 1] == 0).all()
    assert all(x.isfinite().all() for x in found)


def test_a_row_hidden_by_a_large_number_sees_all_alike(seed):
    case = draw(seed, lq=7, lk=13).to(torch.float32)
    mask = torch.zeros(7, 13)
    mask[:, 11:] = -1e9
    mask[2:4] = torch.finfo().min
    case = replace(case, mask=mask.expand(2, 4, 7, 13))
    (go, _), saved = outputs(case, seed)
    torch.testing.assert_close(saved[0][:, :, 2:4], case.v.mean(-2, keepdim=True).expand(2, 4, 2, 16))
    _, _, dv, *_ = backward(go, None, *case.inputs, *saved, **case.options)
    uniform = go[:, :, 2:4].sum(-2) / 13
    torch.testing.assert_close(dv[:, :, 11:], uniform[:, :, None].expand(2, 4, 2, 16), rtol=1e-5, atol=1e-6)


def test_without_keys_there_is_nothing(seed):
    case = draw(seed, lk=5, absent="tv")
    q, k, v, tq, tk = (x[:, :, : 37 if x.shape[2] == 37 else 0] for x in case.inputs[:5])
    saved: tuple[Any, ...] = forward(q, k, v, tq, tk, None, scale=1.0)
    o, to, lse, mu = saved
    assert o.shape == q.shape
    assert not o.any()
    assert not to.any()
    assert not mu.any()
    assert (lse == -torch.inf).all()
    dq, dk, *_ = backward(o + 1, to + 1, q, k, v, tq, tk, None, *saved, scale=1.0)
    assert not dq.any()
    assert dk.shape == k.shape


def test_the_derivative_is_linear_in_huge_tangents(seed):
    case = draw(seed)
    small = run(case)
    huge = run(replace(case, **{n: 2.0**100 * getattr(case, n) for n in ("tq", "tk", "tv")}))
    assert torch.equal(huge[1], 2.0**100 * small[1])
    assert torch.equal(huge[0], small[0])
