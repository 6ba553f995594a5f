"""Backends: what the compiler keeps of one training is no burden to the next."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullstride.step.torch.backends import compiled_loss


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
