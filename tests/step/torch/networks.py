"""A small regression to train, the same training written out by hand, and a recorder that needs no GPU."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.step.torch.runners.graph import GraphRunner
from fullstride.step.torch.runners.isolated import Snapshot


def network(seed: int) -> nn.Module:
    """With a buffer that moves, as batch norm has."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 3)).double()


def batches(seed: int, count: int = 8, size: int = 6, last: int = 4) -> list[dict[str, Tensor]]:
    """Batches, the last one smaller."""
    g = torch.Generator().manual_seed(seed)
    sizes = [size] * (count - 1) + [last]
    draw = lambda n, width: torch.randn(n, width, generator=g, dtype=torch.float64)  # noqa: E731
    return [{"x": draw(n, 5), "y": draw(n, 3)} for n in sizes]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean squared error, and the largest."""
    error = (model(batch["x"]) - batch["y"]).square()
    return error.mean(), {"worst": error.max()}


def noisy(batch: dict[str, Tensor], generator: torch.Generator | None) -> dict[str, Tensor]:
    """The batch with noise on x."""
    noise = torch.randn(batch["x"].shape, generator=generator, dtype=torch.float64)
    return batch | {"x": batch["x"] + 0.1 * noise}


def by_hand(
    model: nn.Module,
    given: list[dict[str, Tensor]],
    *,
    parts: int,
    clip: float,
    rate: Callable[[int], float],
    decay: float,
    generator: torch.Generator,
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Weights, their average and losses, of plain SGD with momentum."""
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, batch in enumerate(given):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        size, total = len(batch["x"]), 0.0
        for piece in torch.arange(size).tensor_split([size * i // parts for i in range(1, parts)]):
            part = noisy({k: v[piece] for k, v in batch.items()}, generator)
            value = loss(model, part)[0] * len(piece) / size
            value.backward()
            total += value.item()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        kept = min(decay, (step + 1) / (10 + step))
        with torch.no_grad():
            for a, w in zip(average.parameters(), model.parameters(), strict=True):
                a.mul_(kept).add_(w, alpha=1 - kept)
        losses.append(total)
    return list(model.parameters()), list(average.parameters()), losses


class Rerun:
    """In place of a CUDA graph: what it records it runs again, and it leaves results and gradients where the first lay.

    Which gradients parameters have is the host's affair: a replay does not change that.
    """

    recorded = 0

    def __init__(self, function: Callable[[], Any], generator: torch.Generator | None):
        """Record without a trace of having run."""
        Rerun.recorded += 1
        self._function = function
        body = function.__self__.body  # pyright: ignore[reportFunctionMemberAccess]
        saved, made = Snapshot(body), function.__self__._made.clone()  # pyright: ignore[reportFunctionMemberAccess]
        self._parameters = list(body.model.parameters())
        self.result = function()
        self._gradients = [p.grad for p in self._parameters]
        saved.restore()
        function.__self__._made.copy_(made)  # pyright: ignore[reportFunctionMemberAccess]

    def replay(self) -> Any:
        """Once more."""
        before = [p.grad for p in self._parameters]
        found = self._function()
        for p, lain, old in zip(self._parameters, self._gradients, before, strict=True):
            if lain is not None and p.grad is not None:
                lain.copy_(p.grad)
            p.grad = old
        if isinstance(found, Tensor):
            self.result.copy_(found)
        return self.result


class OnHost(GraphRunner):
    """Replays on the host."""

    def __init__(self, backend: str, body: Any, eager: Any):
        """With `Rerun` for graphs."""
        super().__init__(backend, body, eager, record=Rerun)
