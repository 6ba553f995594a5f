"""A shift inside GroupNorm on a GPU, at a U-Net's sizes, against the sum and the norm in fp64."""

from typing import Any

import pytest
import torch

from fullstride.jvp import group_norm_dual
from tests.jvp.norms.cases import EPS, relative_error
from tests.jvp.norms.test_shift import drawn, expected

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# Groups on the chip, in pieces and padded, and groups that no chip holds.
SIZES = [((3, 128, 32, 32), 32), ((5, 384, 8, 8), 32), ((2, 36, 9, 7), 3), ((1, 8, 192, 192), 1)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("shape", "groups"), SIZES)
def test_the_kernels_sums_norm(seed, shape, groups, dtype):
    for last in (True, False):
        both = [[a.to("cuda", dtype) for a in each] for each in drawn(seed, shape, last)]
        (y, ty), right = expected(*([a.double() for a in each] for each in both), groups=groups, act="silu")
        given = [a.requires_grad_() for a in (*both[0], *both[1])]
        (x, shift, w, b), (tx, tshift, tw, tb) = given[:4], given[4:]
        own = {"shift": shift, "tshift": tshift, "eps": EPS, "act": "silu", "implementation": "triton"}
        found: Any = group_norm_dual(x, groups, w, b, tx, tw, tb, **own)
        gradients = torch.autograd.grad(found, given, tuple(both[2]))
        assert relative_error(found[0], y) < TOLERANCE[dtype]
        assert relative_error(found[1], ty) < TOLERANCE[dtype]
        assert all(relative_error(a, e) < 2 * TOLERANCE[dtype] for a, e in zip(gradients, right, strict=True))
