"""Steps of a loss, with or without the optimizer, and passes of the network, each checked before timing."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.meanflow.step_gate import TOLERANCE, Exact, Passed, gradients, points, require_all
from benchmarks.cases.meanflow.step_setup import Drawn, StepSetup, weight_passes
from fullstride.device.precision import autocast
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.measure.timing import Call
from fullstride.step.torch import Averages, TrainStep, constant
from fullstride.step.torch.body import Body
from fullstride.step.torch.runners.backends import compiled

StepLoss = Callable[[nn.Module, Drawn], Tensor]
Make = Callable[[StepSetup, MeanFlowLoss], StepLoss]
DECAYS = (0.9999, 0.99995, 0.999, 0.9995, 0.99)  # as many as there can be averages


def plain_loss(setup: StepSetup, loss: MeanFlowLoss) -> StepLoss:
    """Return the loss unchanged."""
    return lambda model, drawn: loss.at(model, **drawn)[0]


@dataclass(frozen=True)
class StepCase:
    """Step of a loss."""

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
        """Number of forward passes."""
        return 3.0 + self.loss.ratio if self.forwards is None else self.forwards

    def start(self, setup: StepSetup, exact: Exact, size: int) -> "Steps":
        """Prepare the case for a batch of that size."""
        return Steps(self, setup, exact, setup.images(size))

    def passes(self, setup: StepSetup) -> float:
        """Number of times that the weights' bytes move, including the optimizer in a whole step."""
        return weight_passes(setup.options.averages) if setup.options.full_step else 3.0


@dataclass
class Steps:
    """Step of a case on a batch."""

    case: StepCase
    setup: StepSetup
    exact: Exact
    x: Tensor

    @functools.cached_property
    def _eager(self) -> Body:
        setup, loss = self.setup, self.case.loss
        return Body(
            loss=self.case.make(setup, loss),
            model=setup.model,
            optimizer=self._optimizer(),
            ema=Averages(setup.model, ()),
            draw=lambda x, _: setup.drawn(loss, x),
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
        """Forward and backward pass, compiled once for all backends."""
        return self._compiled if compiling else self._eager

    def gate(self, compiling: bool) -> Passed:
        """Return the errors of loss and gradients; this is also the first call, which compiles.

        GateError if they are too large.
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
        """Run forward and backward on fresh noise and times."""
        body = self.body(compiling)
        return lambda: body.gradients(self.x)["loss"]

    def whole(self, compiling: bool, graph: bool) -> Call:
        """Return the whole step: a `TrainStep` that uses the compiled loss."""
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
            check_first_step=False,
        )
        return lambda: step(self.x)["loss"]

    def results(self, result: Any) -> list[Tensor]:
        """Return the loss and the gradients of a call, to be compared."""
        return [result, *(p.grad for p in self.setup.model.parameters() if p.grad is not None)]

    def end(self) -> None:
        """Remove the gradients from the network."""
        for p in self.setup.model.parameters():
            p.grad = None


@dataclass(frozen=True)
class Pass:
    """Pass of the network alone: `forward`, `jvp`, or `target`, a JVP that keeps the prediction's graph."""

    name: str
    kind: str
    backends: tuple[str, ...] | None = None
    ours: bool = True
    own: bool = False
    batch: int | None = None

    @property
    def work(self) -> float:
        """Number of forward passes."""
        return 1.0 if self.kind == "forward" else 2.0

    def start(self, setup: StepSetup, exact: Exact, size: int) -> "Passes":
        """Prepare the case for a batch of that size."""
        return Passes(self, setup, exact, exact.batch(setup.loss(1.0), size))

    def passes(self, setup: StepSetup) -> float:
        """Number of times that the weights' bytes are read."""
        return 1.0


@dataclass
class Passes:
    """Pass of the network on a batch."""

    case: Pass
    setup: StepSetup
    exact: Exact
    drawn: Drawn

    @functools.cached_property
    def _eager(self) -> Callable[..., Any]:
        loss = self.setup.loss(1.0)
        if self.case.kind == "forward":
            return lambda model, z, r, t, v: (model(z, r, t),)
        return lambda model, z, r, t, v: loss.velocity_and_derivative(model, z, r, t, v, {})

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        return torch.compile(self._eager, fullgraph=True, dynamic=False)

    def call(self, compiling: bool) -> Call:
        """Run the pass on the same points every time."""
        run, setup, given = self._compiled if compiling else self._eager, self.setup, points(self.drawn)

        def call() -> Any:
            with torch.set_grad_enabled(self.case.kind == "target"), autocast(setup.precision, setup.device):
                return run(setup.model, *given)

        return call

    def gate(self, compiling: bool) -> Passed:
        """Return the errors of u and du/dt; also the first call, which compiles; GateError if they are too large."""
        self.setup.model.train(not self.setup.options.dropout)
        call, results = self.call(compiling), []
        ms = self.setup.clock.time(lambda: results.append(call()))
        self.setup.model.train()
        found = self.results(results[0])
        right = list(self.exact.values(len(found[0])))[: len(found)]
        return Passed(require_all(("u", "du/dt")[: len(found)], found, right, TOLERANCE[self.setup.precision]), ms)

    def results(self, result: Any) -> list[Tensor]:
        """Return the detached outputs of a call."""
        return [x.detach() for x in result]

    def end(self) -> None:
        """Do nothing: a pass leaves no state."""
