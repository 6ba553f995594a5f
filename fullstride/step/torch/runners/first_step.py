"""The first step in each form: what it needs is compiled at once, and what may be off is compared with eager fp32."""

from collections.abc import Callable
from typing import Any

from fullstride.process.gc_paused import nothing_collected
from fullstride.step.torch.body import Body, Metrics
from fullstride.step.torch.runners.comparison import (
    Change,
    compared_elsewhere,
    compile_kernels,
    compile_reference,
    gated,
)
from fullstride.step.torch.runners.expected_shapes import Usual, shapes
from fullstride.step.torch.runners.interface import Runner
from fullstride.step.torch.runners.isolated import CannotCopyError


class FirstSteps:
    """Makes those steps; what was right in one form, a backend's with certain shapes, is not yet so in another.

    A step of one process in fp32 that is neither compiled nor recorded is eager fp32 and is compared with nothing.

    Attributes:
        errors: relative error of the gradients in each form that was compared with eager fp32.

    """

    def __init__(self, usual: Usual, *, gate: bool, awaken: Change | None, announce: bool, say: Callable[[str], None]):
        """Take which batches are usual, what to compare with, whether to announce a pause of `auto`, where to log."""
        self.errors: dict[str, float] = {}
        self._usual, self._gate, self._awaken, self._say = usual, gate, awaken, say
        self._announce = announce
        self._made, self._known = set[str](), list[Any]()

    def forget(self) -> None:
        """Every form has its first step before it again."""
        self._made.clear()

    def done(self, backend: str, runner: Runner, batch: Any) -> bool:
        """Whether the form that this batch runs in has had its first step."""
        return _form(backend, runner, batch) in self._made

    def make(self, backend: str, runner: Runner, body: Body, batch: Any, made: int) -> Metrics:
        """The step that compiles and records what its form needs, and is compared.

        Raises:
            StepError: if it disagrees with eager fp32; a recorded step was made by then, any other was not.

        """
        form = _form(backend, runner, batch)
        # The compiler's graphs are many objects that live until its end: looking for dead ones again and again took a
        # seventh of a compiled first step on a CPU.
        with nothing_collected():
            if self._announce and not self._eager(backend, batch):
                self._announce = False
                self._say(f"backend=auto: {backend} compiles the loss now, which may take minutes")
            self.compile_kernels(backend, body, batch)
            metrics = None
            other = runner.form(batch) == "recorded" or (runner.body.loss is not body.loss and self._usual.fits(batch))
            if self._compares(backend, body, batch) or (other and self._gate):
                metrics = self._compared(backend, runner, body, batch, made)
            if metrics is None:
                metrics = runner(batch, made)
        self._made.add(form)
        return metrics

    def _compared(self, backend: str, runner: Runner, body: Body, batch: Any, made: int) -> Metrics | None:
        """The step, compared; None, and no step, if what it would be compared with cannot be made without a trace."""
        form = _form(backend, runner, batch)
        try:
            self._compare_awake(backend, runner, body, batch)
            metrics, self.errors[form] = gated(runner, body, batch, made, form)
        except CannotCopyError as why:
            self._say(f"{form}: not compared with eager fp32: {why}")
            return None
        return metrics

    def _compares(self, backend: str, body: Body, batch: Any) -> bool:
        """Whether a step that is not recorded is anything else than eager fp32 of one process."""
        other = body.precision != "fp32" or body.reducer is not None
        return self._gate and (other or not self._eager(backend, batch))

    def _eager(self, backend: str, batch: Any) -> bool:
        return "compile" not in backend or not self._usual.fits(batch)

    def compile_kernels(self, backend: str, body: Body, batch: Any) -> None:
        """At once all those of the eager passes that the first batch of these shapes is going to need."""
        if (known := shapes(batch)) in self._known:
            return
        if self._eager(backend, batch):
            compile_kernels(body, batch)
        if self._compares(backend, body, batch):
            compile_reference(body, batch)
        self._known.append(known)

    def _compare_awake(self, backend: str, runner: Runner, body: Body, batch: Any) -> None:
        """Once, and on a batch of the shapes that it is compiled for."""
        form = f"backend={backend}, other weights"
        if self._awaken is None or form in self.errors or "compile" not in backend or not self._usual.fits(batch):
            return
        self.errors[form] = compared_elsewhere(runner.body, body, batch, self._awaken, form)


def _form(backend: str, runner: Runner, batch: Any) -> str:
    return f"backend={backend}, {runner.form(batch)}"
