"""The backward kernels through Triton's interpreter, against fp64. bf16 products are wrong there: see tests/gpu."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from fullstride.jvp.attention import naive, naive_varlen
from fullstride.jvp.attention.backward import backward, backward_varlen
from fullstride.jvp.attention.backward_table import BackwardConfig, pick
from fullstride.jvp.attention.tiles import pieces
from tests.jvp.attention.math_form import Case, draw, expected_backward, transposed

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter; see tests/gpu"),
    # The interpreter's own loops over a runtime range.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

WHOLE = (BackwardConfig("dq dtq", 32, 32, 4, 1), BackwardConfig("dk dtk dv dtv", 32, 32, 4, 1))
HALVES = (
    BackwardConfig("dq", 16, 64, 4, 1),
    BackwardConfig("dtq", 32, 32, 4, 1),
    BackwardConfig("dk dtk", 64, 16, 4, 1),
    BackwardConfig("dv dtv", 32, 32, 4, 1),
)
QUARTERS = (*HALVES[:2], *(BackwardConfig(name, 32, 32, 4, 1, tma=True) for name in ("dk", "dtk", "dv", "dtv")))
PARTS = tuple(replace(launch, parts=16) for launch in HALVES)
TMA = tuple(replace(launch, tma=True) for launch in WHOLE)

CASES: dict[str, tuple[dict[str, Any], Any, torch.dtype]] = {
    "plain": ({"lq": 45, "lk": 33}, WHOLE, torch.float32),
    "tails": ({"d": 24, "dv": 40, "hk": 1, "lq": 34}, HALVES, torch.float32),
    "wide": ({"b": 1, "h": 1, "d": 72, "dv": 80, "lq": 17, "lk": 35}, WHOLE, torch.float16),
    "tma": ({"d": 32, "dv": 16, "lq": 33, "lk": 50}, TMA, torch.float16),
    "parts": ({"d": 40, "dv": 24, "hk": 1, "mask": "additive"}, PARTS, torch.float32),
    "parts_no_tq": ({"absent": "tq", "causal": True}, tuple(replace(x, parts=16) for x in WHOLE), torch.float32),
    "parts_only_tv": ({"absent": "tq tk"}, PARTS, torch.float16),
    "even": ({"lq": 64, "lk": 32}, QUARTERS, torch.float32),
    "one": ({"lq": 1, "lk": 1}, WHOLE, torch.float32),
    "bool": ({"mask": "bool", "hk": 1}, HALVES, torch.float16),
    "heads": ({"mask": "heads", "lq": 19, "lk": 41}, WHOLE, torch.float32),
    "additive": ({"mask": "additive", "causal": True}, QUARTERS, torch.float32),
    "causal_tall": ({"causal": True, "lq": 70, "lk": 33}, TMA, torch.float32),
    "causal_flat": ({"causal": True, "lq": 33, "lk": 70}, WHOLE, torch.float16),
    "window": ({"window": (5, 3), "lq": 64, "lk": 64}, HALVES, torch.float32),
    "window_beyond": ({"window": (2, 0), "lq": 70, "lk": 33}, WHOLE, torch.float32),
    "window_left": ({"window": (20, -1), "hk": 1}, WHOLE, torch.float32),
    "transposed": ({"layout": transposed, "hk": 1, "mask": "bool"}, TMA, torch.float32),
    "columns": ({"layout": lambda x: x.mT.contiguous().mT}, WHOLE, torch.float32),
    "only_tq": ({"absent": "tk tv"}, HALVES, torch.float32),
    "only_tk": ({"absent": "tq tv", "mask": "bool"}, WHOLE, torch.float32),
    "only_tv": ({"absent": "tq tk", "hk": 1}, QUARTERS, torch.float32),
    "no_tq": ({"absent": "tq"}, WHOLE, torch.float32),
    "no_tk": ({"absent": "tk"}, HALVES, torch.float32),
    "no_tv": ({"absent": "tv"}, WHOLE, torch.float32),
}
# Each of their launches and arguments is in another case, too, if not the two together.
LIKE_OTHERS = ("additive", "window_beyond", "causal_flat", "columns", "no_tk", "only_tq")


def poisoning(empty):
    def filled(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    return filled


@pytest.fixture
def poisoned(monkeypatch):
    """Fill outputs with NaN first, so that unwritten elements show."""
    for owner, name in ((torch, "empty"), (torch, "empty_like")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


def close(found, expected):
    """Products and weights are rounded to the dtype: 2 eps of half precision, 16 of fp32 for its sums."""
    assert (found is None) == (expected is None)
    if found is not None:
        roundings = 2 if found.dtype == torch.float16 else 16
        error = (found.double() - expected).norm()
        # With a single key all terms cancel, and each is of this size.
        assert error <= roundings * torch.finfo(found.dtype).eps * expected.norm().clamp(min=8.0)


def with_outputs(case: Case, seed: int) -> tuple[Any, Any, Any]:
    """The outputs, and random gradients of them."""
    saved: Any = naive.forward(*case.inputs, **case.options)
    g = torch.Generator().manual_seed(seed + 100)
    go, gto = torch.randn(2, *saved[0].shape, generator=g, dtype=torch.float64).to(saved[0].dtype)
    return go, gto, saved


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("name", "seed", "detached"),
    [
        *((name, 0, False) for name in CASES if name not in LIKE_OTHERS),
        *(pytest.param(name, 0, False, marks=pytest.mark.thorough) for name in LIKE_OTHERS),
        *((name, 1, True) for name in [*CASES][::6]),
        *(pytest.param(name, 1, True, marks=pytest.mark.thorough) for name in [*CASES][3::6]),
    ],
)
def test_gradients_are_torchs_own(name, seed, detached):
    kwargs, config, dtype = CASES[name]
    chosen: dict[str, Any] = {"b": 1, "h": 2} | kwargs
    case = draw(seed, **chosen).to(dtype)
    go, gto, saved = with_outputs(case, seed)
    gto = None if detached else gto
    found = backward(go, gto, *case.inputs, *saved, **case.options, config=config)
    expected = expected_backward(case.to(torch.float64), go.double(), None if gto is None else gto.double())
    for x, f, e in zip(case.inputs, found, expected, strict=True):
        close(f, e)
        assert f is None or f.stride() == x.stride()


def test_packed_sequences(seed):
    options: Any = ({}, {"causal": True}, {"window": (9, 4)})[seed]
    lengths_q, lengths_k = (33, 0, 1, 40), (20, 7, 50, 0)
    case = draw(seed, b=1, h=2, hk=1, lq=sum(lengths_q) + 3, lk=sum(lengths_k) + 2, d=24, dv=16).to(torch.float32)
    # Rows behind the last sequence belong to none.
    inputs: Any = [x[0].transpose(0, 1).contiguous() for x in case.inputs]
    for x in inputs:
        x[74 if len(x) == 77 else 77 :] = torch.nan
    cu: Any = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (lengths_q, lengths_k)]
    exact = [x.double().nan_to_num() for x in inputs]
    arguments: Any = *exact, *cu
    saved: Any = naive_varlen.forward_varlen(*arguments, scale=0.3, **options)
    go, gto = torch.randn(2, *saved[0].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    arguments = go, gto, *exact, *saved, *cu
    expected = naive_varlen.backward_varlen(*arguments, scale=0.3, **options)
    arguments = go.float(), gto.float(), *inputs, *(x.float() for x in saved), *cu, 40, 50
    found = backward_varlen(*arguments, scale=0.3, **options, config=HALVES)
    for f, e in zip(found, expected, strict=True):
        close(f, e)


@pytest.mark.parametrize("config", [WHOLE, HALVES, QUARTERS])
def test_a_gradient_of_a_tangent_scales_as_its_inverse(config, seed):
    case = draw(seed, b=1, h=1, lq=20, lk=40).to(torch.float32)
    go, gto, saved = with_outputs(case, seed)
    one: Any = backward(go, gto, *case.inputs, *saved, **case.options, config=config)
    c = 2.0**30
    huge = replace(case, **{n: c * getattr(case, n) for n in ("tq", "tk", "tv")})
    scaled_outputs = saved[0], c * saved[1], saved[2], c * saved[3]
    other: Any = backward(go, gto / c, *huge.inputs, *scaled_outputs, **case.options, config=config)
    for n in range(3):
        assert torch.equal(one[n], other[n])
        assert torch.equal(one[n + 3], other[n + 3] * c)


def test_a_broadcast_gradient_is_read_as_it_lies(seed):
    case = draw(seed, b=1, h=2).to(torch.float32)
    _, _, saved = with_outputs(case, seed)
    ones = torch.ones(()).expand_as(saved[0])
    found = backward(ones, ones, *case.inputs, *saved, **case.options, config=WHOLE)
    expected = expected_backward(case.to(torch.float64), ones.double(), ones.double())
    for f, e in zip(found, expected, strict=True):
        close(f, e)


def test_rows_hidden_by_a_large_number_stay_finite(seed):
    case = draw(seed, b=1, h=1, lq=20, lk=33).to(torch.float32)
    for hidden in (-1e4, -1e9, torch.finfo().min):
        mask = torch.zeros(20, 33)
        mask[3:5] = hidden
        mask[:, 30:] = hidden
        full = replace(case, mask=mask.expand(1, 1, 20, 33))
        go, gto, saved = with_outputs(full, seed)
        go[:, :, 3:5] = gto[:, :, 3:5] = 0.0
        found: Any = backward(go, gto, *full.inputs, *saved, **full.options, config=WHOLE)
        seen = replace(case, mask=(mask == 0).expand(1, 1, 20, 33)).to(torch.float64)
        for f, e in zip(found, expected_backward(seen, go.double(), gto.double()), strict=True):
            close(f, e)


@pytest.mark.usefixtures("poisoned")
def test_without_keys_or_queries_gradients_are_zero():
    for lq, lk in ((0, 5), (5, 0)):
        shapes = [(2, 1, lq, 16), (2, 1, lk, 16), (2, 1, lk, 16)] * 2
        q, k, v, tq, tk, tv = (torch.ones(shape) for shape in shapes)
        saved: Any = naive.forward(q, k, v, tq, tk, tv, scale=1.0)
        found: Any = backward(saved[0] + 1, saved[1] + 1, q, k, v, tq, tk, tv, *saved, scale=1.0, config=WHOLE)
        for x, f in zip((q, k, v, tq, tk, tv), found, strict=True):
            assert f.shape == x.shape
            assert not f.any()


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=str)
def test_the_table_makes_each_gradient_once(capability):
    for dtype, d, through in itertools.product((torch.bfloat16, torch.float32), (16, 64, 72, 96, 130, 256), (0, 1)):
        config = pick(dtype, d, d, bool(through), capability)
        names = [name for launch in config for name in launch.of.split()]
        assert sorted(names) == ["dk", "dq", "dtk", "dtq", "dtv", "dv"]
        for launch in config:
            # Fewer rows a warp of wgmma, and Triton 3.6 has two groups of warps share a head's tail of columns: wrong.
            own = launch.block_m if "q" in launch.of else launch.block_n
            wgmma = capability[0] == 9 and own >= 64
            assert not (wgmma and pieces(d)[2]) or own >= 16 * launch.warps
