"""Passes of whole networks: gradients are right with a derivative, every way is measured, and a wrong one is not."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.cases.jvp import networks
from benchmarks.cases.jvp.networks import NETWORKS, Problem
from benchmarks.cases.jvp.options import NETWORKS as NAMES
from benchmarks.cases.jvp.options import NetworksOptions
from benchmarks.harness.results import read_result
from fullstride.jvp import prepare
from fullstride.measure.gate import GateError
from fullstride.measure.timing import TimingPlan
from tests.jvp.foreign.models import library

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"device": "cpu", "precision": "fp32", "batch_size": 2}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(networks, "TimingPlan", lambda **_: TimingPlan(warmup=0, repeats=1, seconds=0))
    monkeypatch.setattr(networks, "WAYS", ("eager", "TrainStep"))


def test_the_options_name_every_network():
    assert set(NAMES) == set(NETWORKS)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_with_a_derivative_are_those_of_a_difference(name, precision):
    if "-" in name and not name.startswith("unet"):
        library(name.split("-")[0])
    problem = Problem.draw(NETWORKS[name], NetworksOptions(**OPTIONS | {"precision": precision}), CPU)
    assert 0 < problem.error() < networks.TOLERANCE[precision]
    prepare(problem.model)
    assert 0 < problem.error() < networks.TOLERANCE[precision]


def test_both_norms_make_the_same_network():
    ours, theirs = (Problem.draw(NETWORKS[name], NetworksOptions(**OPTIONS), CPU).model for name in NAMES[2:])
    given = list(ours.parameters())
    with torch.no_grad():
        for p, q in zip(theirs.parameters(), given, strict=True):
            assert p.shape == q.shape
            p.copy_(q)
    assert not any(isinstance(m, networks.GroupNorm) for m in theirs.modules())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(theirs(x), ours(x))


@pytest.mark.usefixtures("quick")
def test_every_way_is_measured(tmp_path, capsys):
    result = read_result(networks.run(NetworksOptions(**OPTIONS, only=("unet",)), tmp_path))
    ways = [f"unet, {who}, {way}" for who in ("plain", "jvp") for way in ("eager", "TrainStep")]
    assert [row["name"] for row in result["rows"]] == ways
    plain, *_, moving = (row["floor"]["ms"] for row in result["rows"])
    assert moving == pytest.approx(4 / 3 * plain)
    assert "x plain" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_wrong_gradient_is_not_timed(tmp_path, monkeypatch):
    def wrong(model: nn.Module, x: Any, t: Any) -> Any:
        return (model(x) - t).square().mean()

    monkeypatch.setitem(networks.LOSSES, "jvp", wrong)
    with pytest.raises(GateError):
        networks.run(NetworksOptions(**OPTIONS, only=("unet",)), tmp_path)
    assert not list(tmp_path.iterdir())
