import pytest
import torch
import torch.nn.functional as F

from fullstride.jvp import jvp
from fullstride.meanflow.models.resample import Double, Halve, Repeat

ORDERS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_repetition_is_the_nearest_neighbour_in_the_same_order(order, seed):
    torch.manual_seed(seed)
    x = torch.randn(2, 5, 3, 7, dtype=torch.float64).contiguous(memory_format=order).requires_grad_()
    found, expected = Repeat()(x), F.interpolate(x, scale_factor=2.0)
    assert torch.equal(found, expected)
    assert found.is_contiguous(memory_format=order)
    gradient = torch.randn_like(expected)
    mine, theirs = (torch.autograd.grad(y, x, gradient)[0] for y in (found, expected))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("make", [Halve, Double, Repeat])
def test_the_tangent_of_a_linear_map_is_the_map_of_the_tangent(make, seed):
    torch.manual_seed(seed)
    x, t = torch.randn(2, 2, 3, 4, 6, dtype=torch.float64)
    resample = make().double()
    found, expected = jvp(resample, (x,), (t,)), (resample(x), resample(t))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert expected[1].abs().sum() > 1
