"""Operators between a batch of a shared pass and a plain tensor, compiled; without the tests' checks of types."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullstride.jvp import partial_jvp
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.objective.times import LogitNormalV1
from fullstride.step.torch import TrainStep


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


def compiled(f: Any, x: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    """The values of x and the derivative of its first samples."""
    torch._dynamo.reset()
    way = torch.compile(lambda x, moved: partial_jvp(f, (x,), (moved,)), fullgraph=True, backend="eager")
    return way(x, moved)


def main() -> None:
    """Check that what the compiler does not tell apart is refused, and that the rest is what eager code has."""
    loss = MeanFlowLoss(ratio=0.75, times=LogitNormalV1(), weighting_power=0.75, weighting_eps=1e-3, split="shared")
    model = Shifted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(lambda m, x: loss(m, x), model, optimizer, backend="compile")
    with pytest.raises(Exception, match="a compiled `batch -= tensor`"):
        step(torch.randn(16, 6))
    x, moved, square, wide = torch.rand(5, 4, 4), torch.randn(2, 4, 4), torch.rand(4, 4), torch.rand(4, 3)

    def added(x: Tensor) -> Tensor:
        x = x.exp()
        x += square
        return x

    def divided(x: Tensor) -> Tensor:
        x = x.exp()
        x /= square
        return x

    def multiplied(x: Tensor) -> Tensor:
        x @= wide
        return x

    for symbol, f in {r"\+": added, "/": divided, "@": multiplied}.items():
        with pytest.raises(Exception, match=f"a compiled `batch {symbol}= tensor`"):
            compiled(f, x, moved)
    with pytest.raises(Exception, match=r"both of which could be the first; call torch\.matmul"):
        compiled(lambda x: x @ square, x, moved)
    functions = [
        lambda x: x @ wide, lambda x: wide.T @ x, lambda x: torch.matmul(x, square), lambda x: torch.matmul(square, x),
        lambda x: x**square, lambda x: wide[:, 0] ** x, lambda x: 2**x, lambda x: square - x, lambda x: x / square,
    ]  # fmt: skip
    for f in functions:
        found = compiled(f, x, moved)
        torch.testing.assert_close(found, (f(x), torch.func.jvp(f, (x[:2],), (moved,))[1]))


if __name__ == "__main__":
    main()
