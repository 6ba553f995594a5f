"""The distance of features, held against sums over pixels, and runs that use it."""

import pytest
import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.config.losses import PerceptualConfig
from fullstride.meanflow.config.networks import UNetConfig
from fullstride.meanflow.metrics.classifier import FeatureClassifier
from fullstride.meanflow.objective.improved import ImprovedMeanFlow
from fullstride.meanflow.objective.loss import MeanFlowLoss, interpolate
from fullstride.meanflow.objective.perceptual import PerceptualMeanFlow, feature_distance
from fullstride.meanflow.training.objective import features_of
from fullstride.meanflow.training.trainer import Trainer, train
from fullstride.runs.folder import read_metrics
from tests.meanflow.checkpoints.test_start import config
from tests.meanflow.data.test_tensors import content, read, saved
from tests.meanflow.objective.test_derivative import random_unet
from tests.meanflow.objective.test_loss import data

NET = UNetConfig(channels=4, channel_mult=[1], num_blocks=1, attention_resolutions=[])


class Edges(nn.Module):
    """Differences along both axes: a feature network of another package."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]]


def by_hand(a: list[Tensor], b: list[Tensor], i: int) -> float:
    """d of sample i, place by place."""
    total = 0.0
    for x, y in zip(a, b, strict=True):
        places = [(p, q) for p in range(x.shape[2]) for q in range(x.shape[3])]
        apart = [x[i, :, p, q] / x[i, :, p, q].norm() - y[i, :, p, q] / y[i, :, p, q].norm() for p, q in places]
        total += sum(d.square().sum().item() for d in apart) / len(places)
    return total


def test_it_is_improved_meanflow_and_the_weighted_distance_at_small_times(seed):
    net, x = random_unet(seed), data(seed)
    given = {"ratio": 0.5, "weighting_power": 0.75, "weighting_eps": 1e-3, "split": "static"}
    loss = PerceptualMeanFlow(**given, features=Edges(), perceptual_weight=0.3, perceptual_until=0.6)
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    t = torch.linspace(0.1, 0.95, len(x), dtype=x.dtype)
    r = torch.where(r < t, r, t)
    z = interpolate(x, e, t)
    image = z - t[:, None, None, None] * net(z, torch.where(torch.arange(len(x)) < 5, r, t), t)
    added = 0.0
    for i in range(len(x)):
        d = by_hand(Edges()(image), Edges()(x), i)
        added += 0.3 * d / (d + 1e-3) ** 0.75 / len(x) if t[i] <= 0.6 else 0.0
    expected = ImprovedMeanFlow(**given).at(net, x, e, t, torch.where(torch.arange(len(x)) < 5, r, t))[0]
    got, metrics = loss.at(net, x, e, t, torch.where(torch.arange(len(x)) < 5, r, t))
    torch.testing.assert_close(got, expected + added)
    assert added > 0.02
    assert {"squared_error_mf", "squared_error_fm"} <= metrics.keys()


def test_the_gradient_goes_through_the_features_of_the_image_alone(seed):
    net, x = random_unet(seed), data(seed)
    features = nn.Conv2d(x.shape[1], 6, 3).double()
    loss = PerceptualMeanFlow(weighting_power=0.0, ratio=0.0, features=features, perceptual_until=1.0)
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    plain = MeanFlowLoss(ratio=0.0, weighting_power=0.0).at(net, x, e, t, r)[0]
    z = interpolate(x, e, t)
    image = z - t[:, None, None, None] * net(z, t, t)
    f, g = (y / (y.square().sum(1, keepdim=True) + 1e-10).sqrt() for y in (features(image), features(x).detach()))
    expected = plain + 0.4 * (f - g).square().sum(1).mean((1, 2)).mean()
    weights = list(net.parameters())
    for a, b in zip(*(torch.autograd.grad(y, weights) for y in (loss.at(net, x, e, t, r)[0], expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_features_that_differ_in_shape_are_refused():
    for a, b in ((torch.ones(2, 3, 4), torch.ones(2, 3, 5)), ([], []), (torch.ones(2), torch.ones(2))):
        with pytest.raises(ValueError, match="expected tensors .b, channels"):
            feature_distance(a, b)
    with pytest.raises(ValueError, match="without features"):
        PerceptualMeanFlow().at(nn.Identity(), *torch.ones(2, 2, 3), *torch.ones(2, 2))


def test_the_maps_of_the_classifier_lead_to_its_features():
    net, x = FeatureClassifier(1, 3, width=4), torch.randn(2, 1, 9, 9)
    maps = net.maps(x)
    assert [m.shape[1] for m in maps] == [4, 8, 8]
    torch.testing.assert_close(net.body[6:](maps[-1]), net.features(x))


@pytest.mark.parametrize("features", [pytest.param("classifier", marks=pytest.mark.thorough), f"{__name__}:Edges"])
def test_a_run_learns_by_a_named_network_of_features(features, tmp_path):
    loss = PerceptualConfig("perceptual", features=features)
    run = train(config(tmp_path, model=NET, loss=loss, log_every=1))
    assert all(line["loss"] > 0 for line in read_metrics(run) if "loss" in line)


def test_what_has_no_such_features_is_refused(tmp_path):
    for name, message in ((f"{__name__}:by_hand", "expected a class of torch.nn.Module"), ("no.such:Net", "no")):
        with pytest.raises(ConfigError, match=message):
            Trainer(config(tmp_path, model=NET, loss=PerceptualConfig("perceptual", features=name)))
    tensors = read(saved(tmp_path, content(0)))
    with pytest.raises(ConfigError, match="data=tensors: expected pictures"):
        features_of("classifier", tensors, torch.device("cpu"))
