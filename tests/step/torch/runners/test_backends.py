"""Backends: what the compiler keeps of one training is no burden to the next."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fullstride.step.torch.runners.backends import compiled_loss


@dataclass
class _Scaled:
    """A loss whose code all its instances share."""

    factor: float

    def __call__(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return (self.factor * model(batch)).square().sum(), {"mean": batch.mean()}


def test_any_number_of_losses_is_compiled_in_a_process(seed):
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in range(1, 4):
            model, batch, loss = nn.Linear(size, 3), torch.randn(5, size), _Scaled(float(size))
            compiled = compiled_loss(loss)
            for _ in range(2):
                torch.testing.assert_close(compiled(model, batch), loss(model, batch))


def _moved(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    y, moved = torch.func.jvp(model, (batch,), (batch.cos(),))[:2]
    return (y + moved).square().sum(), {"mean": y.mean()}


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_dropout_between_convolutions_leaves_out_what_eagers_does(seed, order):
    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 3, 3)]
    model, batch = nn.Sequential(convolutions[0]), torch.randn(9, 3, 11, 13).contiguous(memory_format=order)
    for convolution in convolutions[1:]:
        model.extend([nn.SiLU(), nn.Dropout(0.5), convolution])
    gradients = []
    for loss in (_moved, compiled_loss(_moved, on_cpu=True)):
        torch.manual_seed(seed)
        gradients.append(torch.autograd.grad(loss(model, batch)[0], list(model.parameters())))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


def test_the_compiled_loss_of_a_lazily_negated_batch_is_eagers(seed):
    model, batch = nn.Linear(3, 2), torch.randn(5, 3, dtype=torch.complex64).conj().imag
    loss = _Scaled(2.0)
    torch.testing.assert_close(compiled_loss(loss)(model, batch), loss(model, batch))
