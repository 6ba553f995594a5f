"""First step in each form: it is compiled at once, and compared with eager fp32."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fullstride.process.gc_paused import gc_paused
from fullstride.step.torch.body import Body, Gradients, Runner
from fullstride.step.torch.metrics import Metrics
from fullstride.step.torch.runners.comparison import (
    Change,
    clipped,
    compare,
    compile_kernels,
    on_copies,
    overflows,
    plain,
    reference,
)
from fullstride.step.torch.runners.expected_shapes import ShapeTracker
from fullstride.step.torch.runners.graph import RECORDED
from fullstride.step.torch.runners.isolated import CannotCopyError


class FirstSteps:
    """Makes those steps; what was right in one form, a backend's with certain shapes, is not yet so in another.

    A step of one process in fp32 that is neither compiled nor captured is eager fp32 and is not compared.

    Attributes:
        made: the forms that have had their first step.
        errors: relative error of the gradients in each form that was compared with eager fp32.

    """

    def __init__(
        self,
        tracker: ShapeTracker,
        gate: bool,
        awaken: Change | None,
        *,
        announce: bool,
        say: Callable[[str], None],
    ):
        """Take who knows the batch's shapes, whether to compare, whether to announce a compile, and where to log.

        `awaken` changes weights in place; a compiled loss is compared with those, too.
        """
        self.made = set[str]()
        self.errors: dict[str, float] = {}
        self._tracker = tracker
        self._gate = gate
        self._awaken = awaken
        self._announce = announce
        self._say = say
        self._known = list[Any]()
        self._postponed = False

    def make(self, runner: Runner, batch: Any, made: int, *, expected: bool) -> Metrics:
        """Make the first step of a form: compile and capture, and compare.

        Raises:
            StepError: if it disagrees with eager fp32; a captured step was made by then, any other was not.

        """
        form, self._postponed = runner.form(expected), False
        compiles = runner.compiles and expected
        step = functools.partial(runner, batch, made, expected=expected)
        # The compiler's graphs are many objects that live until its end: looking for dead ones again and again took a
        # seventh of a compiled first step on a CPU.
        with gc_paused():
            if self._announce and compiles:
                self._announce = False
                self._say(f"backend=auto: {runner.backend} compiles the loss now, which may take minutes")
            self.compile_kernels(runner.eager, batch, compiles=compiles)
            compared = self._compares(runner.eager, compiles) or (self._gate and RECORDED in form)
            metrics = self._compared(form, runner, batch, step, compiles) if compared else None
            if metrics is None:
                metrics = step()
        if not self._postponed:
            self.made.add(form)
        return metrics

    def _compared(
        self, form: str, runner: Runner, batch: Any, step: Callable[..., Metrics], compiles: bool
    ) -> Metrics | None:
        """Make the step and compare it; None, without a step, if its reference cannot be computed without a trace."""
        awake = f"backend={runner.backend}, other weights"
        try:
            if compiles and self._awaken is not None and awake not in self.errors:
                # Once, and on a batch of the shapes that it is compiled for; no step is made.
                expected = reference(runner.eager, batch, self._awaken)
                found = on_copies(runner.body, batch, self._awaken)
                gradients = [found.gradients.get(name) for name in runner.eager.trained]
                self.errors[awake] = compare(runner.eager, expected, found.loss, gradients, awake)
            expected = reference(runner.eager, batch)
        except CannotCopyError as why:
            self._say(f"{form}: not compared with eager fp32: {why}")
            return None

        if RECORDED in form and runner.eager.clip is not None and runner.eager.clip.value is not None:
            expected = clipped(runner.eager, expected)

        def look(loss: Tensor, gradients: Gradients | None) -> None:
            if overflows(runner.eager, loss, gradients):
                self._postponed = True
                return
            self.errors[form] = compare(runner.eager, expected, loss, gradients, form)

        return step(look=look)

    def _compares(self, body: Body, compiles: bool) -> bool:
        """Return whether a step that is not captured differs from eager fp32 on one process."""
        return self._gate and (body.precision != "fp32" or body.reducer is not None or compiles)

    def compile_kernels(self, body: Body, batch: Any, *, compiles: bool) -> None:
        """Compile at once all kernels that the eager passes of the first batch of these shapes need."""
        if self._tracker.shapes in self._known:
            return
        if not compiles:
            compile_kernels(body, batch)
        if self._compares(body, compiles):
            with plain(body) as exact:
                compile_kernels(exact, batch)
        self._known.append(self._tracker.shapes)
