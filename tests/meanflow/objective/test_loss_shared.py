"""The split `shared`: the losses and gradients of `static`, at the primals' cost in memory and products."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fullstride.jvp.mixed_batch import MixedBatch
from fullstride.meanflow.config.schema import LossConfig
from fullstride.meanflow.models.common import recompute
from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.models.song_unet import SongUNet
from fullstride.meanflow.models.unet import UNet
from fullstride.meanflow.objective.derivative import velocity_and_some_derivatives
from fullstride.meanflow.objective.guidance import Guidance
from fullstride.meanflow.objective.improved import ImprovedMeanFlow
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.training.build import in_channels_last
from fullstride.meanflow.training.objective import build_loss
from tests.jvp.networks import saved_bytes
from tests.meanflow.fields import batch_of_points
from tests.meanflow.objective.test_derivative import central_difference

SMALL = {"channels": 8, "channel_mult": (1, 2), "num_blocks": 1, "attention_resolutions": (4,)}
NETWORKS = {
    "unet": lambda dropout: UNet(3, 8, **SMALL, dropout=dropout, num_classes=4),
    "song_unet": lambda dropout: SongUNet(3, 8, **SMALL, dropout=dropout, num_classes=4, augment_dim=5),
    "dit": lambda _: DiT(3, 8, width=16, depth=2, heads=2, qk_norm=True, num_classes=4),
}


def network(name: str, seed: int, dropout: float = 0.0) -> nn.Module:
    """In fp64, with every parameter random."""
    torch.manual_seed(seed)
    net = NETWORKS[name](dropout).double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    return net


def batch(name: str, size: int, seed: int) -> dict[str, Any]:
    """Noise, data and labels."""
    x, e, t, r = batch_of_points(seed, batch=size, shape=(3, 8, 8))
    given = {"x": x, "e": e, "t": t, "r": r, "label": torch.arange(size) % 4}
    return given | ({"conditions": {"augment": torch.randn(size, 5).double()}} if name == "song_unet" else {})


def singles(given: dict[str, Any]) -> dict[str, Any]:
    return tree_map(lambda x: x.float() if x.is_floating_point() else x, given)


def results(net: nn.Module, loss: MeanFlowLoss, given: dict[str, Any]) -> list[Tensor]:
    """Loss, metrics and gradients."""
    value, metrics = loss.at(net, **given)
    return [value, *metrics.values(), *torch.autograd.grad(value, list(net.parameters()))]


@pytest.mark.parametrize(("ratio", "size"), [(0.0, 3), (0.25, 5), (0.25, 8), (0.6, 7), (1.0, 2)])
@pytest.mark.parametrize("name", NETWORKS)
def test_loss_metrics_and_gradients_are_those_of_two_passes(name, ratio, size):
    """Whatever r is where it stands for t."""
    net, given = network(name, size), batch(name, size, size)
    found = [results(net, MeanFlowLoss(ratio=ratio, split=split), given) for split in ("static", "shared")]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
    assert found[0][0] > 0


@pytest.mark.parametrize("name", NETWORKS)
def test_guidance_changes_nothing_of_that(name):
    net, given = network(name, 3), batch(name, 7, 3)
    guided = MeanFlowLoss(ratio=0.4, guidance=Guidance(4, omega=1.5, kappa=0.3))
    found = [results(net, loss, given) for loss in (guided, dataclasses.replace(guided, split="shared"))]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_nor_does_a_predicted_tangent(name):
    net, given = network(name, 4, dropout=0.0), batch(name, 7, 4)
    predicted = ImprovedMeanFlow(ratio=0.4, guidance=Guidance(4, omega=1.5))
    found = [results(net, loss, given) for loss in (predicted, dataclasses.replace(predicted, split="shared"))]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_it_takes_the_samples_of_the_static_split():
    x = torch.randn(9, 1, 4, 4)
    draws = [MeanFlowLoss(split=s).draw(x, torch.Generator().manual_seed(3)) for s in ("static", "shared")]
    assert all(torch.equal(a, b) for a, b in zip(*draws, strict=True))


@pytest.mark.parametrize("name", ["unet", "song_unet"])
def test_prediction_and_derivative_are_of_one_mask(name, seed):
    net = network(name, seed, dropout=0.4).train()
    z, v, t, r = batch_of_points(seed, shape=(3, 8, 8))

    def run(f):
        torch.manual_seed(5)
        return f()

    def masked(z: Tensor, r: Tensor, t: Tensor, label: None) -> Tensor:
        return run(lambda: net(z, r, t))

    v[3:] = 0  # a difference moves all: only those in front are compared
    u, dudt = run(lambda: velocity_and_some_derivatives(net, z, r, t, v[:3]))
    torch.testing.assert_close(u, masked(z, r, t, None), rtol=1e-9, atol=1e-9)
    expected = central_difference(masked, z, r, t, v)[:3]
    assert (dudt - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("name", NETWORKS)
def test_it_keeps_what_flow_matching_keeps(name):
    net, given = network(name, 0).float(), batch(name, 8, 0)
    given = singles(given)
    kept = [
        saved_bytes(lambda ratio=ratio: MeanFlowLoss(ratio=ratio, split="shared").at(net, **given)[0])
        for ratio in (0.0, 0.25, 0.75, 1.0)
    ]
    assert max(kept[1:]) <= 1.02 * kept[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_that_are_computed_anew_change_nothing(name):
    net, given = network(name, 2, dropout=0.4), batch(name, 7, 2)
    loss = MeanFlowLoss(ratio=0.4, split="shared")
    found, kept = [], []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(results(net, loss, given))
        kept.append(saved_bytes(lambda: loss.at(net, **given)[0]))
        recompute(net)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
    assert kept[1] < 0.7 * kept[0]


@pytest.mark.parametrize("name", ["unet", "song_unet"])
def test_every_layer_keeps_the_images_memory_order(name):
    net = in_channels_last(network(name, 0))
    seen = []

    def look(module: nn.Module, _: object, out: object) -> None:
        if isinstance(out, MixedBatch) and out.ndim == 4 and min(out.shape[1:]) > 1:
            seen.extend((type(module).__name__, x.is_contiguous(memory_format=torch.channels_last)) for x in pair(out))

    def pair(x: MixedBatch) -> tuple[Tensor, Tensor]:
        return x.primal, x.tangent

    for module in net.modules():
        module.register_forward_hook(look)
    z, v, t, r = batch_of_points(0, shape=(3, 8, 8))
    velocity_and_some_derivatives(net, z, r, t, v[:3])
    assert len(seen) > 40
    assert [name for name, kept in seen if not kept] == []


def test_in_bf16_it_is_as_near_as_two_passes():
    net, given = network("unet", 1), batch("unet", 8, 1)
    exact = results(net, MeanFlowLoss(ratio=0.5), given)
    net, given = net.float(), singles(given)
    errors = []
    for split in ("static", "shared"):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            value, _ = MeanFlowLoss(ratio=0.5, split=split).at(net, **given)
        found = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(net.parameters()))]).double()
        right = torch.cat([g.flatten() for g in exact[-len(list(net.parameters())) :]])
        errors.append(((found - right).norm() / right.norm()).item())
    assert 0 < errors[1] < 1.3 * errors[0] < 0.3


class Own(nn.Module):
    """A user's network with an operation that has no rule."""

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return torch.digamma(z.square() + 1) * t[:, None, None, None]


def test_what_cannot_share_a_pass_is_told_what_to_do():
    x = torch.randn(4, 1, 4, 4)
    with pytest.raises(ValueError, match=r"digamma has no rule .*; use loss.split=static"):
        MeanFlowLoss(split="shared")(Own(), x)
    MeanFlowLoss(split="static")(Own(), x)


@pytest.mark.parametrize("settings", [{"backend": "two_pass"}, {"chunk": 2}, {"precision": "bf16"}])
def test_other_ways_to_take_the_derivative_are_refused(settings):
    with pytest.raises(ValueError, match=r"split=shared with jvp_backend=.*, or use split=static"):
        MeanFlowLoss(split="shared", **settings)


@pytest.mark.parametrize(
    ("settings", "split"),
    [
        ({}, "shared"),
        ({"jvp_backend": "forward_ad"}, "static"),
        ({"jvp_chunk": 4}, "static"),
        ({"split": "full"}, "full"),
    ],
)
def test_a_run_shares_the_pass_where_the_derivative_allows_it(settings, split):
    assert build_loss(LossConfig(**settings)).split == split
