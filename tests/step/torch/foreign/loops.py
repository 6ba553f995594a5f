"""A loop written by hand, beside the same training by `TrainStep`."""

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fullstride.step.torch import TrainStep

# All cases: FULLSTRIDE_FOREIGN=all python -m pytest tests/step/torch/foreign
ALL = os.environ.get("FULLSTRIDE_FOREIGN") == "all"
STEPS = 8


class Case(NamedTuple):
    """A training: loss, model, optimizer, the batches, and what else must end alike."""

    loss: Callable[[nn.Module, Any], Any]
    model: nn.Module
    optimizer: Any
    batches: list[Any]
    others: Callable[[], Any] = lambda: None


def chosen(cases: dict[str, Any], few: tuple[str, ...]) -> Any:
    """A parametrization by the cases: the few that every run has, or all."""
    return pytest.mark.parametrize("case", [pytest.param(cases[k], id=k) for k in cases if ALL or k in few])


def made(case: Callable[[], Case], seed: int) -> Case:
    """The case from a seed."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    return case()


def state(case: Case) -> list[Any]:
    """Return the state that must be equal at the end."""
    return [copy.deepcopy(case.others()), case.model.state_dict(), torch.rand(1)]


def by_hand(case: Case, precision: str = "fp32", accumulate: int = 1) -> list[Any]:
    """The loop that a tutorial has."""
    mode = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
    for batch in case.batches:
        case.optimizer.zero_grad()
        parts = (
            [batch]
            if accumulate == 1
            else [{k: v.chunk(accumulate)[i] for k, v in batch.items()} for i in range(accumulate)]
        )
        for part in parts:
            with mode:
                result = case.loss(case.model, part)
            value: Tensor = result[0] if isinstance(result, tuple) else result
            (value / accumulate).backward()
        case.optimizer.step()
    return state(case)


def by_step(case: Case, **options: Any) -> tuple[list[Any], TrainStep]:
    """Run the case's loop by `TrainStep`."""
    given: dict[str, Any] = {"backend": "eager"} | options
    step = TrainStep(case.loss, case.model, case.optimizer, log=lambda _: None, **given)
    for batch in case.batches:
        step(batch)
    return state(case), step
