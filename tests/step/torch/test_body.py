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
        step = TrainStep(loss, model, torch.optim.SGD(model.parameters()), backend="eager", gate=False)
        step(torch.randn(5, 3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [how == "free"]
    assert not torch.backends.cudnn.benchmark
