"""Passes of the network alone, as the step's bench times them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.meanflow.step_gate import TOLERANCE, Exact, Passed, points, require_all
from benchmarks.cases.meanflow.step_setup import Drawn, Setup
from fullstride.measure.timing import Call


@dataclass(frozen=True)
class Pass:
    """A pass of the network alone: `forward`, `jvp`, or `target`, a JVP that keeps the prediction's graph."""

    name: str
    kind: str
    backends: tuple[str, ...] | None = None
    ours: bool = True
    own: bool = False
    batch: int | None = None

    @property
    def work(self) -> float:
        """Forward passes."""
        return 1.0 if self.kind == "forward" else 2.0

    def start(self, setup: Setup, exact: Exact, size: int) -> "Passes":
        """Ready to be run on a batch of that size."""
        return Passes(self, setup, exact, exact.batch(setup.loss(1.0), size))

    def passes(self, setup: Setup) -> float:
        """The weights are read."""
        return 1.0


@dataclass
class Passes:
    """A pass on a batch."""

    case: Pass
    setup: Setup
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
        """The pass on the same points every time."""
        run, setup, given = self._compiled if compiling else self._eager, self.setup, points(self.drawn)

        def call() -> Any:
            with torch.set_grad_enabled(self.case.kind == "target"), setup.autocast():
                return run(setup.model, *given)

        return call

    def gate(self, compiling: bool) -> Passed:
        """Errors of u and du/dt; this is also the first call, which compiles.

        Raises:
            GateError: if they are too large.

        """
        self.setup.model.train(not self.setup.options.dropout)
        call, results = self.call(compiling), []
        ms = self.setup.clock.time(lambda: results.append(call()))
        self.setup.model.train()
        found = self.results(results[0])
        right = list(self.exact.values(len(found[0])))[: len(found)]
        return Passed(require_all(("u", "du/dt")[: len(found)], found, right, TOLERANCE[self.setup.precision]), ms)

    def results(self, result: Any) -> list[Tensor]:
        """What a call returns."""
        return [x.detach() for x in result]

    def end(self) -> None:
        """Nothing is left."""
