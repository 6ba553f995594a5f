"""Optimizers, schedules and wrappers of other libraries around a small network."""

import importlib.util
import runpy
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullstride.errors import ConfigError
from fullstride.step.torch import TrainStep, cosine
from tests.step.torch.foreign.loops import STEPS, Case, by_hand, by_step, chosen, made


def of(make: Any) -> Case:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 3))
    optimizer = make(model)
    batches = [{"x": torch.randn(6, 5), "y": torch.randn(6, 3)} for _ in range(3 * STEPS)]
    loss = lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean()  # noqa: E731
    groups = lambda: [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]  # noqa: E731
    return Case(loss, model, optimizer, batches, groups)


def schedule_free() -> Case:
    kind = pytest.importorskip("schedulefree").AdamWScheduleFree
    case = of(lambda model: kind(model.parameters(), lr=1e-2))
    case.optimizer.train()
    return case


def prodigy() -> Case:
    kind = pytest.importorskip("prodigyopt").Prodigy
    return of(lambda model: kind(model.parameters()))


def adafactor() -> Case:
    kind = pytest.importorskip("transformers").Adafactor
    return of(lambda model: kind(model.parameters(), lr=None, scale_parameter=True, relative_step=True))


def lookahead() -> Case:
    # The file alone, as the package wants torchvision.
    package = importlib.util.find_spec("timm") or pytest.skip("needs timm")
    [folder] = package.submodule_search_locations or []
    kind = runpy.run_path(str(Path(folder, "optim", "lookahead.py")))["Lookahead"]
    return of(lambda model: kind(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), k=3))


def accelerated() -> Case:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    return of(lambda model: accelerator.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2)))


class Slow(torch.optim.Optimizer):
    """A wrapper that has no hooks and no state of its own, as many have."""

    def __init__(self, inner: torch.optim.Optimizer):  # as many do, without torch's
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = defaultdict(dict)
        self.steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.steps += 1
        if self.steps % 3:
            self.inner.step()


def wrapped() -> Case:
    return of(lambda model: Slow(torch.optim.Adam(model.parameters(), lr=1e-2)))


def clipping_hook() -> Case:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def clipped(*_: Any) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        optimizer.register_step_pre_hook(clipped)
        return optimizer

    return of(make)


def nesterov() -> Case:
    return of(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True))


OPTIMIZERS = {
    f.__name__: f for f in (schedule_free, prodigy, adafactor, lookahead, accelerated, wrapped, clipping_hook, nesterov)
}
FEW = tuple(OPTIMIZERS)


@chosen(OPTIMIZERS, FEW)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_eager_steps_are_those_of_a_loop_by_hand_to_the_last_bit(case, precision):
    expected = by_hand(made(case, 0), precision)
    found, _ = by_step(made(case, 0), precision=precision)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@chosen(OPTIMIZERS, FEW)
def test_accumulated_gradients_are_those_of_a_loop_by_hand(case):
    expected = by_hand(made(case, 1), accumulate=2)
    found, _ = by_step(made(case, 1), accumulate=2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@chosen(OPTIMIZERS, FEW)
def test_a_candidate_that_auto_refuses_leaves_nothing_behind(case, monkeypatch):
    from dataclasses import replace

    from fullstride.step.torch import train_step

    def wrong(body: Any) -> Any:
        def off(model: nn.Module, batch: Any) -> Any:
            value = body.loss(model, batch)
            weight = next(model.parameters()).sum()
            return value + 3 * (weight - weight.detach())

        return replace(body, loss=off)

    monkeypatch.setattr(train_step, "compiled", wrong)
    expected = by_hand(made(case, 2))
    found, step = by_step(made(case, 2), backend="auto")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert step.backend == "eager"


def test_a_schedule_over_no_rate_is_refused():
    case = adafactor()
    with pytest.raises(ConfigError, match="schedule: Adafactor has lr=None and chooses its own rate"):
        TrainStep(case.loss, case.model, case.optimizer, schedule=cosine(10), backend="eager")


def test_schedules_of_transformers_scale_the_rate_that_was_set():
    transformers = pytest.importorskip("transformers")
    found = []
    for by in ("hand", "step"):
        case = made(lambda: of(lambda model: torch.optim.SGD(model.parameters(), lr=0.3)), 3)
        step = TrainStep(case.loss, case.model, case.optimizer, backend="eager") if by == "step" else None
        case.optimizer.param_groups[0]["lr"] = 0.01
        schedule = transformers.get_linear_schedule_with_warmup(case.optimizer, 3, 20)
        for batch in case.batches:
            if step is None:
                by_hand(case._replace(batches=[batch]))
            else:
                step(batch)
            schedule.step()
        found.append([*case.model.parameters(), case.optimizer.state_dict()["param_groups"]])
    torch.testing.assert_close(*found, rtol=0, atol=0)
