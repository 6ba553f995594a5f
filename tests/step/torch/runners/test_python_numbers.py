"""Python numbers that a loss reads, which a compiled or recorded step has as constants."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from fullstride.step.torch import TrainStep
from fullstride.step.torch import train_step as train_step_module
from fullstride.step.torch.runners import backends as backends_module
from fullstride.step.torch.runners.backends import compiled_loss
from fullstride.step.torch.runners.expected_shapes import AGAIN, NEVER
from tests.step.torch.networks import OnHost, Rerun

WEIGHT = 1.0
SETTINGS = {"weight": 1.0}


class Held:
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        self.weight, self.steps = 1.0, 0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return (self.weight * model(x)).square().mean()


class Scaled(nn.Linear):
    """A network with a factor."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x) * self.factor


def in_a_global() -> tuple[Any, Callable[[float], None]]:
    def change(value: float) -> None:
        global WEIGHT
        WEIGHT = value

    return lambda model, x: (WEIGHT * model(x)).square().mean(), change


def in_a_dict() -> tuple[Any, Callable[[float], None]]:
    return lambda model, x: (SETTINGS["weight"] * model(x)).square().mean(), lambda v: SETTINGS.update(weight=v)


def in_a_closure() -> tuple[Any, Callable[[float], None]]:
    weight = 1.0

    def change(value: float) -> None:
        nonlocal weight
        weight = value

    return lambda model, x: (weight * model(x)).square().mean(), change


def in_an_object() -> tuple[Any, Callable[[float], None]]:
    held = Held()

    def change(value: float) -> None:
        held.weight = value
        held.steps += 1  # which the loss does not read

    return held, change


def in_the_class() -> tuple[Any, Callable[[float], None]]:
    return lambda model, x: model(x).square().mean(), lambda value: setattr(Scaled, "factor", value)


PLACES = [in_a_global, in_a_dict, in_a_closure, in_an_object, in_the_class]


@pytest.fixture
def hosted(monkeypatch):
    """Backends on the host; calls of what would be compiled are counted."""
    monkeypatch.setattr(backends_module, "GraphRunner", OnHost)
    monkeypatch.setattr(train_step_module, "check_backend", lambda *_: None)
    monkeypatch.setattr(train_step_module, "compiled", lambda body: replace(body, loss=counted(body.loss)))
    monkeypatch.setattr(Rerun, "recorded", 0)


SEEN: list[int] = []


def counted(loss: Any) -> Any:
    def noted(model: nn.Module, x: Tensor) -> Tensor:
        SEEN.append(len(x))
        return loss(model, x)

    return noted


def trained(place: Any, backend: str, values: list[float], seed: int) -> tuple[list[Any], list[str], TrainStep]:
    loss, change = place()
    torch.manual_seed(seed)
    model = Scaled(3, 3)
    said = list[str]()
    step = TrainStep(loss, model, torch.optim.SGD(model.parameters(), lr=0.125), backend=backend, log=said.append)
    SEEN.clear()
    found = []
    for number, value in enumerate(values):
        change(value)
        found.append(step(torch.randn(4, 3, generator=torch.Generator().manual_seed(number)))["loss"])
    change(1.0)
    return [found, *model.parameters()], said, step


@pytest.mark.usefixtures("hosted")
@pytest.mark.parametrize("backend", ["compile", "graph"])
@pytest.mark.parametrize("place", PLACES)
def test_a_number_that_changes_at_every_step_keeps_steps_eager_and_is_named(place, backend):
    values = [1 + 0.1 * i for i in range(NEVER + 3)]
    found, said, _ = trained(place, backend, values, 0)
    compiled = len(SEEN)
    expected, nothing, _ = trained(place, "eager", values, 0)
    torch.testing.assert_close(found, expected)
    assert not nothing
    [line] = said
    assert f"backend={backend}: the loss reads Python numbers that change, " in line
    assert "(was 1.0, is 4.2)" in line
    assert Rerun.recorded == 0
    if backend == "compile":
        assert compiled == 1


@pytest.mark.usefixtures("hosted")
@pytest.mark.parametrize("backend", ["compile", "graph"])
@pytest.mark.parametrize("place", PLACES)
def test_a_number_that_changes_once_is_compiled_and_recorded_anew(place, backend):
    values = [1.0] * 12 + [2.5] * 12
    found, said, step = trained(place, backend, values, 1)
    compiled = len(SEEN)
    expected, *_ = trained(place, "eager", values, 1)
    torch.testing.assert_close(found, expected)
    [line] = said
    assert "the loss reads other numbers, " in line
    assert "(was 1.0, is 2.5); from here on steps are specialised to these" in line
    if backend == "compile":
        assert compiled == 24 - (AGAIN - 1)
    else:
        assert Rerun.recorded == 2
        assert len(step.errors) == 1


@pytest.mark.usefixtures("hosted")
def test_a_network_that_is_set_to_eval_is_recorded_anew():
    def switched(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    losses = {}
    for backend in ("graph", "eager"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        step, losses[backend] = TrainStep(switched, model, optimizer, backend=backend, log=lambda _: None), []
        for number in range(20):
            model.train(number < 10)
            losses[backend].append(step(torch.randn(4, 3, generator=torch.Generator().manual_seed(number)))["loss"])
    torch.testing.assert_close(losses["graph"], losses["eager"])
    assert Rerun.recorded == 2


def test_auto_goes_on_eagerly_where_a_number_changes_at_every_step():
    values = [1 + 0.1 * i for i in range(NEVER + 8)]
    found, said, step = trained(in_a_closure, "auto", values, 2)
    expected, *_ = trained(in_a_closure, "eager", values, 2)
    torch.testing.assert_close(found, expected)
    assert step.backend == "eager"
    assert "weight (was 1.0" in said[0]


def test_what_the_compiler_refuses_to_compile_again_runs_uncompiled_and_is_said(capsys, monkeypatch):
    tried = []

    def refusing(function: Any, **_: Any) -> Any:
        def run(model: nn.Module, x: Tensor) -> Tensor:
            tried.append(len(x))
            if len(tried) > 2:
                raise FailOnRecompileLimitHit("Hard failure due to fullgraph=True")
            return function(model, x)

        return run

    monkeypatch.setattr(torch, "compile", refusing)
    model, x = nn.Linear(3, 3), torch.randn(4, 3)
    run = compiled_loss(lambda model, x: model(x).square().mean(), on_cpu=True)
    for _ in range(5):
        torch.testing.assert_close(run(model, x), model(x).square().mean())
    assert len(tried) == 3
    assert capsys.readouterr().err.count("changes again and again") == 1
