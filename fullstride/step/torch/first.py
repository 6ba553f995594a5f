"""The first step in each form: what it needs is compiled at once, and what it finds is compared with eager fp32."""

from collections.abc import Callable
from typing import Any

from torch import nn

from fullstride.collector import nothing_collected
from fullstride.step.torch.body import Body, Metrics
from fullstride.step.torch.gate import compared_elsewhere, compile_kernels, compile_reference, gated
from fullstride.step.torch.runner import Runner
from fullstride.step.torch.usual import Usual, shapes


class FirstSteps:
    """Makes those steps; what was right in one form, a backend's with certain shapes, is not yet so in another.

    Attributes:
        errors: relative error of the gradients in each form that was compared with eager fp32.

    """

    def __init__(self, usual: Usual, *, gate: bool, awaken: Callable[[nn.Module], object] | None):
        """Take which batches are usual, whether to compare, and what gives other weights to compare with, too."""
        self.errors: dict[str, float] = {}
        self._usual, self._gate, self._awaken = usual, gate, awaken
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
            StepError: if it disagrees with eager fp32; the step was made.

        """
        form = _form(backend, runner, batch)
        # The compiler's graphs are many objects that live until its end: looking for dead ones again and again took a
        # seventh of a compiled first step on a CPU.
        with nothing_collected():
            self.compile_kernels(backend, body, batch)
            if self._gate:
                self._compare_awake(backend, runner, body, batch)
                metrics, self.errors[form] = gated(runner, body, batch, made, form)
            else:
                metrics = runner(batch, made)
        self._made.add(form)
        return metrics

    def compile_kernels(self, backend: str, body: Body, batch: Any) -> None:
        """At once all those of the eager passes that the first batch of these shapes is going to need."""
        if (known := shapes(batch)) in self._known:
            return
        eager = "compile" not in backend or not self._usual.fits(batch)
        if eager:
            compile_kernels(body, batch)
        if self._gate and not (eager and body.precision == "fp32"):
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
