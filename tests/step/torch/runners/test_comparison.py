"""The reference of a step's comparison, eager fp32, and its tolerance."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fullstride.step.torch import TrainStep
from fullstride.step.torch import train_step as train_step_module
from fullstride.step.torch.runners import comparison as gate
from fullstride.step.torch.runners import first_step
from fullstride.step.torch.runners.comparison import StepError


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def with_its_own_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain(model, x)


def in_weights_format(model: nn.Module, x: Tensor) -> Tensor:
    return plain(model, x.to(next(model.parameters()).dtype))


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(33, 129), nn.GELU(), nn.Linear(129, 65), nn.LayerNorm(65), nn.Linear(65, 7))


@pytest.mark.parametrize(
    ("loss", "dtype", "tolerance"),
    [
        (plain, torch.float32, 0.0),
        (plain, torch.float64, 0.0),
        (with_its_own_autocast, torch.float32, gate.TOLERANCE["bf16"]),
        (in_weights_format, torch.bfloat16, gate.TOLERANCE["bf16"]),
    ],
)
def test_a_loss_that_rounds_by_itself_is_compared_by_that_format(loss, dtype, tolerance, seed, monkeypatch):
    """Another order of the same sums, as a compiler's, is off by that format's digits, a wrong term by more."""
    found, compare = [], gate.compare
    monkeypatch.setattr(
        first_step, "compare", lambda body, expected, *given: found.append(expected) or compare(body, expected, *given)
    )
    model, x = network(seed).to(dtype), torch.randn(31, 33, dtype=torch.float64 if dtype == torch.float64 else None)
    step = TrainStep(loss, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="compile")
    step(x)
    assert [r.tolerance for r in found] == [tolerance]
    assert step.errors


@pytest.mark.parametrize("loss", [with_its_own_autocast, plain])
def test_a_wrong_term_is_refused_in_any_format(loss: Callable[..., Tensor], seed, monkeypatch):
    def wrong(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model[0](x)  # pyright: ignore[reportIndexIssue]
        return loss(nn.Sequential(*list(model.children())[1:]), hidden.detach() + 0.5 * (hidden - hidden.detach()))

    monkeypatch.setattr(train_step_module, "compiled", lambda body: replace(body, loss=wrong))
    model = network(seed)
    before = copy.deepcopy(model.state_dict())
    step = TrainStep(loss, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="compile")
    with pytest.raises(StepError, match="the gradients differ most at 0"):
        step(torch.randn(31, 33))
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model", "precision", "convolutions", "expected"),
    [
        (nn.Conv1d(3, 5, 3), "fp32", True, "tf32"),  # PyTorch's default
        (nn.GRU(3, 5), "fp32", True, "tf32"),
        (nn.Conv1d(3, 5, 3), "fp32", False, "fp32"),
        (nn.Linear(3, 5), "fp32", True, "fp32"),
        (nn.Conv1d(3, 5, 3), "bf16", True, "bf16"),
    ],
)
def test_fp32_on_a_gpu_is_what_pytorchs_switches_make_of_it(model, precision, convolutions, expected, monkeypatch):
    monkeypatch.setattr(gate, "rounds_convolutions", lambda: convolutions)
    monkeypatch.setattr(gate, "rounds_recurrences", lambda: convolutions)
    monkeypatch.setattr(gate, "rounds_products", lambda: False)
    assert gate._format_of(precision, model, torch.device("cuda")) == expected
    assert gate._format_of(precision, model, torch.device("cpu")) == precision
