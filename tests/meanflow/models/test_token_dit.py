"""The transformer for samples of any rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullstride.jvp import check_tangents
from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.models.token_dit import TokenDiT, axis_positions
from fullstride.meanflow.objective.derivative import velocity_and_some_derivatives
from fullstride.meanflow.training.step import randomize_zero_layers

SMALL: dict[str, Any] = {"width": 24, "depth": 2, "heads": 3, "num_classes": 4}
UNEVEN: dict[str, Any] = SMALL | {"width": 25}
SHAPES = [((5,), (1,), ()), ((2, 6), (3,), (7,)), ((3, 4, 4), (2,), (3, 5)), ((2, 3, 4, 6), (1, 2, 3), ())]


def network(shape: tuple[int, ...], patches, condition, seed: int) -> TokenDiT:
    torch.manual_seed(seed)
    size = shape[1] if len(shape) == 3 and shape[1] == shape[2] else shape[1:]
    net = TokenDiT(shape[0], size, patch_sizes=patches, condition_shape=condition, **SMALL)
    return randomize_zero_layers(net, torch.Generator().manual_seed(seed)).double().eval()  # pyright: ignore[reportReturnType]


def inputs(shape: tuple[int, ...], condition, seed: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    z, t = (torch.randn(3, *shape, generator=g, dtype=torch.float64), torch.rand(3, generator=g, dtype=torch.float64))
    given = {"label": torch.randint(4, (3,), generator=g)}
    if condition:
        given["condition"] = torch.randn(3, *condition, generator=g, dtype=torch.float64)
    return z, t * 0.4, t, given


@pytest.mark.parametrize(("shape", "patches", "condition"), SHAPES)
def test_samples_keep_their_shape_and_every_input_counts(shape, patches, condition, seed):
    net, (z, r, t, given) = network(shape, patches, condition, seed), inputs(shape, condition, seed)
    u = net(z, r, t, **given)
    assert u.shape == z.shape
    others = {"label": (given["label"] + 1) % 4}
    others |= {"condition": given["condition"].flip(1)} if condition else {}
    for changed in (net(z, r * 0.5, t, **given), net(z, r, t + 0.1, **given), net(z, r, t, **given | others)):
        assert (changed - u).abs().max() > 1e-4
    for name, other in others.items():
        assert (net(z, r, t, **given | {name: other}) - u).abs().max() > 1e-4
    moved = z.clone()
    moved[0].view(-1)[0] += 1
    difference = net(moved, r, t, **given) - u
    assert difference[0].abs().min() > 0  # of one sample, every number
    assert difference[1:].abs().max() < 1e-12


@pytest.mark.parametrize(("shape", "patches", "condition"), SHAPES)
def test_the_derivative_is_right_also_of_some_samples(shape, patches, condition, seed):
    net, (z, r, t, given) = network(shape, patches, condition, seed), inputs(shape, condition, seed)

    class Conditioned(nn.Module):
        def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
            return net(z, r, t, **given)

    v = torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    check_tangents(Conditioned(), (z, r, t), (v, None, torch.ones_like(t)), tolerance=1e-9)
    u, some = velocity_and_some_derivatives(net, z, r, t, v[:2], given)
    step = 1e-6
    ends = [net(z + s * v, r, t + s, **given) for s in (step, -step)]
    torch.testing.assert_close(some, ((ends[0] - ends[1]) / (2 * step))[:2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(u, net(z, r, t, **given))


def test_of_square_pictures_it_is_dit(seed):
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"width": 24, "depth": 2, "heads": 3, "num_classes": 4}
    picture, any_rank = DiT(3, 6, patch_size=2, **sizes), TokenDiT(3, 6, patch_sizes=(2,), **sizes)
    for net in (picture, any_rank):
        net.position.zero_()  # whose axes are in another order
    randomize_zero_layers(picture, torch.Generator().manual_seed(seed))
    any_rank.load_state_dict(picture.state_dict())
    z, r, t, given = inputs((3, 6, 6), 0, seed)
    z, r, t = z.float(), r.float(), t.float()
    torch.testing.assert_close(any_rank(z, r, t, **given), picture(z, r, t, **given), rtol=1e-5, atol=1e-5)


def test_places_are_told_apart_by_each_axis():
    rows = axis_positions((3, 2, 4), 25)
    assert rows.shape == (24, 25)
    assert len(torch.unique(rows, dim=0)) == 24
    assert torch.equal(rows[:, 24:], torch.zeros(24, 1, dtype=torch.float64))
    assert axis_positions((), 6).tolist() == [[0.0] * 6]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenDiT(2, (6, 4), patch_sizes=(4,), **SMALL), r"patch_sizes are \[4\] for samples of 2 x \(6, 4\)"),
        (lambda: TokenDiT(2, (6, 4), patch_sizes=(2, 2, 2), **SMALL), "a divisor of each axis"),
        (lambda: TokenDiT(2, (6,), **UNEVEN), "width is 25"),
        (
            lambda: TokenDiT(2, (6,), **SMALL)(torch.zeros(1, 2, 7), torch.zeros(1), torch.zeros(1)),
            r"expected \(2, 6\)",
        ),
        (
            lambda: TokenDiT(2, (6,), condition_shape=(3,), **SMALL)(torch.zeros(1, 2, 6), *torch.zeros(2, 1)),
            r"conditions are none, expected \(3,\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
