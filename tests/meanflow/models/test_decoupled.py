"""Decoupled MeanFlow: the first blocks of a transformer see t, the last ones r."""

import pytest
import torch

from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.objective.derivative import velocity_and_derivative, velocity_and_some_derivatives
from tests.meanflow.models.test_dit import LABEL, by_hand, points, random_dit
from tests.meanflow.objective.test_derivative import central_difference


def test_a_flow_is_its_own_conversion(seed):
    """At r = t the function is the plain network's, whatever its weights."""
    plain, decoupled = random_dit(seed, depth=3), random_dit(seed + 10, depth=3, decoupled_blocks=2)
    decoupled.load_state_dict(plain.state_dict())
    z, _, t, r = points(seed, plain)
    torch.testing.assert_close(decoupled(z, t, t, LABEL), by_hand(plain, 3, z, t, t, LABEL))
    assert not torch.allclose(decoupled(z, r, t, LABEL), plain(z, r, t, LABEL), rtol=1e-2)


def test_the_first_blocks_see_t_alone_and_the_last_r_alone(seed):
    """Each block's conditioning is the plain network's at one time."""
    net = random_dit(seed, depth=3, decoupled_blocks=2)
    seen = []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda module, given: seen.append(given[1]))
    z, _, t, r = points(seed, net)
    net(z, r, t, LABEL)
    early, late = net.conditioning(t, t, LABEL), net.conditioning(r, r, LABEL)
    for got, expected in zip(seen, (early, late, late), strict=True):
        torch.testing.assert_close(got, expected)


def test_the_derivative_is_that_of_central_differences(seed):
    net = random_dit(seed, decoupled_blocks=1)
    z, v, t, r = points(seed, net)
    given = {"label": LABEL}
    expected = central_difference(net, z, r, t, v, LABEL, h=2e-5)
    _, dudt = velocity_and_derivative(net, z, r, t, v, given)
    assert expected.norm() > 1
    assert (dudt - expected).norm() / expected.norm() < 1e-7
    _, some = velocity_and_some_derivatives(net, z, r, t, v[:2], given)
    assert (some - expected[:2]).norm() / expected[:2].norm() < 1e-7


@pytest.mark.parametrize("blocks", [-1, 2, 5])
def test_some_blocks_must_see_each_time(blocks):
    with pytest.raises(ValueError, match=f"decoupled_blocks is {blocks}, expected 0 to 1 of 2 blocks"):
        DiT(1, 4, width=8, depth=2, heads=2, decoupled_blocks=blocks)
