"""A shared pass that loses what a network writes into a view, compiled; without the tests' checks of types."""

import pytest
import torch
from torch import Tensor, nn

from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.objective.times import LogitNormalV1
from fullstride.step.torch import TrainStep
from fullstride.step.torch.runners.comparison import StepError


class Shifted(nn.Module):
    """Subtracts a plain tensor from a view in place, which the compiler takes for an assignment to the name."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 6)
        self.shift = nn.Parameter(torch.randn(4, 2))

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        hidden = self.first(torch.cat([z, r[:, None], t[:, None]], 1))
        view = hidden.view(-1, 4, 2)
        view -= self.shift
        return self.last(hidden.sin())


def main() -> None:
    """Check that a compiled step refuses it in either format."""
    loss = MeanFlowLoss(ratio=0.75, times=LogitNormalV1(), weighting_power=0.75, weighting_eps=1e-3, split="shared")
    for precision in ("fp32", "bf16"):
        model = Shifted()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(lambda m, x: loss(m, x), model, optimizer, backend="compile", precision=precision)
        with pytest.raises(StepError, match="backend=compile, usual shapes"):
            step(torch.randn(16, 6))


if __name__ == "__main__":
    main()
