import pytest
import torch
from torch import nn

from fullstride.step.torch import TrainStep


@pytest.mark.parametrize("how", ["free", "deterministic", "cudnn"])
def test_cudnn_searches_its_algorithms_unless_kernels_must_be_deterministic(how, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", how == "cudnn")
    torch.use_deterministic_algorithms(how == "deterministic")
    seen: list[bool] = []
    model = nn.Linear(3, 1)

    def loss(model, x):
        seen.append(torch.backends.cudnn.benchmark)
        return model(x).square().mean()

    try:
        step = TrainStep(loss, model, torch.optim.SGD(model.parameters()), backend="eager", check_first_step=False)
        step(torch.randn(5, 3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [how == "free"]
    assert not torch.backends.cudnn.benchmark


RETURNED = {
    "each": (lambda error: error.mean(1), r"a loss of float32\[4\]; expected a scalar: take its mean"),
    "one": (lambda error: error.mean().view(1), r"a loss of float32\[1\]; expected a scalar: take its mean"),
    "paired": (lambda error: (error, {"mean": error.mean()}), r"a loss of float32\[4,2\]; expected a scalar"),
    "whole": (lambda error: error.mean().long(), r"a loss of int64\[\]; expected a floating dtype"),
    "complex": (
        lambda error: torch.complex(error.mean(), error.mean()),
        r"a loss of complex64\[\]; expected a floating",
    ),
    "number": (lambda error: error.mean().item(), r"a float; expected a scalar tensor, or the pair of it and metrics"),
    "none": (lambda error: None, r"a NoneType; expected a scalar tensor"),
    "three": (lambda error: (error.mean(), {}, error), r"a tuple of 3; expected a scalar tensor, or the pair"),
}


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize("returned", RETURNED)
def test_a_loss_that_is_no_floating_scalar_is_told_as_that(returned, backend, gate):
    made, message = RETURNED[returned]
    model = nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters())
    step = TrainStep(lambda model, x: made(model(x).square()), model, optimizer, backend=backend, check_first_step=gate)
    with pytest.raises(ValueError, match=f"^loss_fn returned {message}"):
        step(torch.randn(4, 3))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert step.made == 0


def test_a_compiled_loss_that_is_no_scalar_is_told_as_that():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    step = TrainStep(lambda model, x: model(x).square(), model, optimizer, backend="compile", check_first_step=False)
    with pytest.raises(ValueError, match=r"^loss_fn returned a loss of float32\[4,2\]; expected a scalar"):
        step(torch.randn(4, 3))
