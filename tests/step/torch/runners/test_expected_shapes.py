"""Which batches a step is made for, and what happens to the others."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fullstride.step.torch import TrainStep
from fullstride.step.torch import train_step as train_step_module
from fullstride.step.torch.runners import backends as backends_module
from fullstride.step.torch.runners.backends import BACKENDS, COUNTED, UNCOUNTED
from fullstride.step.torch.runners.expected_shapes import AGAIN, NEVER, Observation, ShapeTracker
from tests.step.torch.networks import OnHost, Rerun, loss, network


def batch_of(size: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1000 * seed + size)
    draw = lambda width: torch.randn(size, width, generator=g, dtype=torch.float64)  # noqa: E731
    return {"x": draw(5), "y": draw(3), **more}


@pytest.fixture
def calls(monkeypatch):
    """Sizes that a compiled loss was called with; what is recorded runs again on the host."""
    found: list[int] = []

    def counted(body: Any) -> Any:
        def noted(model: nn.Module, batch: Any) -> Any:
            found.append(len(batch["x"]))
            return loss(model, batch)

        return replace(body, loss=noted)

    monkeypatch.setattr(train_step_module, "compiled", counted)
    monkeypatch.setattr(backends_module, "GraphRunner", OnHost)
    monkeypatch.setattr(train_step_module, "check_backend", lambda *_: None)
    monkeypatch.setattr(Rerun, "recorded", 0)
    return found


def make(seed: int, backend: str, said: list[str], **more: Any) -> tuple[nn.Module, TrainStep]:
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)  # which fp32, that a record keeps it in, has exactly
    return model, TrainStep(loss, model, optimizer, backend=backend, log=said.append, **more)


@torch.no_grad()
def other_weights(model: nn.Module) -> None:
    for p in model.parameters():
        p.add_(0.1)


def observed(sizes: Iterable[int], tracker: ShapeTracker) -> list[str]:
    return [tracker.observe(batch_of(n)).name for n in sizes]


def test_the_first_batch_is_expected_until_others_come_again_and_again():
    tracker = ShapeTracker()
    assert observed([2, *[6] * AGAIN, 6], tracker) == ["FIRST", *["OTHER"] * (AGAIN - 1), "SWITCHED", "EXPECTED"]
    found = observed([2, 2, 2, 2, 2, 6, 3, 3, 3, 3], tracker)
    assert [name == "EXPECTED" for name in found] == [n == 6 for n in (2, 2, 2, 2, 2, 6, 3, 3, 3, 3)]
    assert "SWITCHED" not in found
    tracker.forget()
    assert observed([3, 6, 3], tracker) == ["FIRST", "OTHER", "EXPECTED"]


def test_sizes_that_take_turns_change_nothing():
    turns = [*[6] * AGAIN, *[4] * 9, *[6] * 9, *[4] * 9]
    found = observed(turns, ShapeTracker())
    assert found == ["FIRST", *["EXPECTED" if n == 6 else "OTHER" for n in turns[1:]]]


def test_batches_none_of_which_is_usual_are_told_of_once():
    tracker = ShapeTracker()
    found = [tracker.observe(batch_of(6, id=step)) for step in range(3 * NEVER)]
    assert [step for step, each in enumerate(found) if each is Observation.LOST] == [NEVER]
    assert Observation.SWITCHED not in found


@pytest.mark.parametrize("backend", ["compile", "graph", "compile+graph"])
def test_a_run_that_begins_with_a_last_smaller_batch_is_compiled_and_recorded(calls, backend, seed):
    said = list[str]()
    model, step = make(seed, backend, said)
    other, eager = make(seed, "eager", [])
    sizes = [2, *[6] * 12, 2, *[6] * 4]
    for number, size in enumerate(sizes):
        batch = batch_of(size, number)
        torch.testing.assert_close(step(batch)["loss"], eager(batch)["loss"])
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()))
    assert [line for line in said if "specialised to these" in line] == said
    assert len(said) == 1
    if "compile" in backend:
        assert calls.count(6) >= 4
    if "graph" in backend:
        assert Rerun.recorded >= 1
        assert step._runner.form(expected=True) == f"backend={backend}, recorded"
    # What runs in another form than before is compared with eager fp32.
    assert any("usual shapes" in form or "recorded" in form for form in step.errors)


def test_auto_measures_though_the_first_batch_was_a_smaller_one(calls, seed):
    said = list[str]()
    _, step = make(seed, "auto", said)
    for number, size in enumerate([2, *[6] * 80]):
        step(batch_of(size, number))
    assert [("specialised to these" in x, "compiles" in x, " ms" in x) for x in said] == [
        (1, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
    ]


def test_a_candidate_whose_turn_begins_with_a_smaller_batch_is_measured_too(calls, seed):
    _, step = make(seed, "auto", said := [], randomize_zeros=other_weights)
    turn = [*[6] * (UNCOUNTED + COUNTED), 2]  # the smaller one is the next candidate's first
    for number, size in enumerate([*turn * len(BACKENDS), *[6] * 9]):
        step(batch_of(size, number))
    _, line = said
    assert all(f"{name} " in line for name in BACKENDS)
    assert 2 not in calls
    assert "backend=compile, other weights" in step.errors
    assert Rerun.recorded >= 2


def test_a_loaded_run_may_begin_with_a_smaller_batch_too(calls, seed):
    _, step = make(seed, "compile", said := [])
    for number in range(6):
        step(batch_of(6, number))
    step.body.optimizer.load_state_dict(step.body.optimizer.state_dict())
    calls.clear()
    for number, size in enumerate([2, *[6] * 9]):
        step(batch_of(size, number))
    assert calls.count(6) >= 5
    assert len(said) == 1


def test_what_differs_in_every_batch_is_told(calls, seed):
    _, step = make(seed, "auto", said := [])
    for number in range(40):
        step(batch_of(6, number, id=number))
    (line,) = said
    assert "pass what changes as tensors" in line
    _, eager = make(seed, "eager", said := [])
    for number in range(40):
        eager(batch_of(6, number, id=number))
    assert said == []
