"""Steps of a loss, as the step's bench times them: eager or compiled, alone or whole, behind their gate."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.meanflow.step_gate import TOLERANCE, Exact, Passed, gradients, require_all
from benchmarks.cases.meanflow.step_setup import Drawn, Setup, weight_passes
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.measure.timing import Call
from fullstride.step.torch import Averages, TrainStep, constant
from fullstride.step.torch.body import Body
from fullstride.step.torch.runners.backends import compiled

StepLoss = Callable[[nn.Module, Drawn], Tensor]
Make = Callable[[Setup, MeanFlowLoss], StepLoss]
DECAYS = (0.9999, 0.99995, 0.999, 0.9995, 0.99)  # as many as there can be averages


def plain_loss(setup: Setup, loss: MeanFlowLoss) -> StepLoss:
    """The loss as it is."""
    return lambda model, drawn: loss.at(model, **drawn)[0]


@dataclass(frozen=True)
class Case:
    """A step of a loss."""

    name: str  # what it is
    loss: MeanFlowLoss  # what is minimised
    make: Make = plain_loss  # the loss function that is run, of this loss
    backends: tuple[str, ...] | None = None  # the only ones that it is run by, out of the chosen
    ours: bool = True  # whether it must be right: what fails of others is told and no more
    own: bool = False  # whether it compiles or captures by itself; its backend is but a name then
    tolerance: float | None = None  # of its errors; None is the precision's
    forwards: float | None = None  # forward passes that its arithmetic takes at least; None is 3 + ratio
    batch: int | None = None  # samples; None is the chosen number

    @property
    def work(self) -> float:
        """Forward passes."""
        return 3.0 + self.loss.ratio if self.forwards is None else self.forwards

    def start(self, setup: Setup, exact: Exact, size: int) -> "Steps":
        """Ready to be run on a batch of that size."""
        return Steps(self, setup, exact, setup.images(size))

    def passes(self, setup: Setup) -> float:
        """Times that the weights' bytes move: forward, backward, gradients; in a whole step also `weight_passes`'s."""
        return weight_passes(setup.options.averages) if setup.options.full_step else 3.0


@dataclass
class Steps:
    """A case on a batch."""

    case: Case
    setup: Setup
    exact: Exact
    x: Tensor

    @functools.cached_property
    def _eager(self) -> Body:
        setup, loss = self.setup, self.case.loss
        draw = lambda x, _: setup.drawn(loss, x)  # noqa: E731
        run = self.case.make(setup, loss)
        return Body(
            loss=run,
            model=setup.model,
            optimizer=self._optimizer(),
            ema=Averages(setup.model, ()),
            draw=draw,
            precision=setup.precision,
            generator=setup.generator,
        )

    @functools.cached_property
    def _compiled(self) -> Body:
        return compiled(self._eager)

    def _optimizer(self) -> torch.optim.AdamW:
        # At a rate of nothing all rows share one network.
        return torch.optim.AdamW(self.setup.model.parameters(), lr=0.0, fused=True)

    def body(self, compiling: bool) -> Body:
        """Forward and backward pass; compiled once for all backends."""
        return self._compiled if compiling else self._eager

    def gate(self, compiling: bool) -> Passed:
        """Errors of loss and gradients; this is also the first call, which compiles.

        Raises:
            GateError: if they are too large.

        """
        body, model = replace(self.body(compiling), draw=None), self.setup.model
        model.train(not self.setup.options.dropout)
        try:
            drawn, metrics = self.exact.batch(self.case.loss, len(self.x)), {}
            ms = self.setup.clock.time(lambda: metrics.update(body.gradients(drawn)))
            found = [metrics["loss"], gradients([p.grad for p in model.parameters()])]
        finally:
            model.train()
        right = list(self.exact.step(self.case.loss, len(self.x)))
        tolerance = self.case.tolerance or TOLERANCE[self.setup.precision]
        return Passed(require_all(("loss", "gradients"), found, right, tolerance), ms)

    def call(self, compiling: bool) -> Call:
        """Forward and backward on fresh noise and times."""
        body = self.body(compiling)
        return lambda: body.gradients(self.x)["loss"]

    def whole(self, compiling: bool, graph: bool) -> Call:
        """The optimizer step: a `TrainStep`, which is handed what is compiled already."""
        body = self.body(compiling)
        step = TrainStep(
            body.loss,
            body.model,
            self._optimizer(),
            draw=body.draw,
            ema=Averages(body.model, DECAYS[: self.setup.options.averages]),
            schedule=constant,
            precision=body.precision,
            backend="graph" if graph else "eager",
            generator=body.generator,
            gate=False,
        )
        return lambda: step(self.x)["loss"]

    def results(self, result: Any) -> list[Tensor]:
        """What a call leaves, to be compared: the loss and the gradient."""
        return [result, *(p.grad for p in self.setup.model.parameters() if p.grad is not None)]

    def end(self) -> None:
        """Leave nothing in the network."""
        for p in self.setup.model.parameters():
            p.grad = None
