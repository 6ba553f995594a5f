"""The derivative alone through Triton's interpreter, against fp64, beside a primal computed in fp64."""

import itertools
from typing import Any

import pytest
import torch

from fullstride.jvp.attention.forward_table import Config
from fullstride.jvp.attention.tangent import tangent_from_lse
from tests.jvp.attention.closed_form import assert_close, dual_attention, make_inputs

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter; see tests/gpu"),
    # The interpreter's own loops over a runtime range.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

SMALL = Config(32, 16, 4, 2)
TMA = Config(16, 32, 4, 2, tma=True)


def check(inputs, scale, config=SMALL, **kwargs):
    dtype = inputs[0].dtype
    expected = dual_attention(inputs, scale, **kwargs)
    primal: Any = (expected[0].to(dtype), expected[2].float())
    to, mu = tangent_from_lse(*inputs, *primal, scale=scale, config=config, **kwargs)
    assert_close((*primal[:1], to, primal[1], mu), expected, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "config"),
    [
        ((1, 4, 2, 35, 29, 72, 16), torch.float32, SMALL),
        ((2, 1, 1, 20, 49, 64, 64), torch.float16, TMA),
        ((1, 1, 1, 1, 1, 16, 80), torch.float32, SMALL),
    ],
    ids=str,
)
def test_derivative(shape, dtype, config, seed):
    torch.manual_seed(seed)
    check(make_inputs(shape, dtype, packed=shape[0] == 1), shape[5] ** -0.5, config)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, (9, 4)), (False, (25, -1))])
def test_bands(causal, window, seed):
    torch.manual_seed(seed)
    check(make_inputs((1, 1, 1, 50, 41, 16, 16), torch.float32), -0.3, causal=causal, window=window)


@pytest.mark.parametrize("added", [False, True])
def test_masks_and_rows_that_see_nothing(added, seed):
    torch.manual_seed(seed)
    mask = torch.rand(1, 2, 37, 43) < 0.6
    mask[:, :, 5] = False
    mask = torch.randn(1, 2, 37, 43).masked_fill(~mask, -torch.inf) if added else mask
    check(make_inputs((1, 2, 2, 37, 43, 16, 32), torch.float32), 0.25, mask=mask)


@pytest.mark.parametrize("present", list(itertools.product([True, False], repeat=3))[:-1], ids=str)
def test_absent_tangents_are_zero(present, seed):
    torch.manual_seed(seed)
    q, k, v, *tangents = make_inputs((1, 1, 1, 20, 37, 16, 16), torch.float32)
    check((q, k, v, *(t if p else None for t, p in zip(tangents, present, strict=True))), 0.25)


def test_nothing_to_do():
    inputs = make_inputs((2, 1, 1, 5, 0, 16, 16), torch.float32)
    check(inputs, 1.0)
