"""One row of `meanflow-jax` in a process of its own: a step of one framework, checked against fp64 and timed.

Imports no framework, so that the one process has PyTorch alone and the other JAX alone.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from benchmarks.cases.meanflow.options import StepOptions
from benchmarks.harness.budget import say
from benchmarks.harness.code_digest import joined
from benchmarks.harness.environment import slug
from benchmarks.harness.process_pool import await_turn, share_cores
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import Ceilings
from fullstride.measure.timing import HostClock, Timing, TimingPlan, measure

PYTORCH, JAX = "PyTorch", "JAX"
SIDES = {
    PYTORCH: "benchmarks.cases.meanflow.framework_torch:TorchSide",
    JAX: "benchmarks.cases.meanflow.in_jax.side:JaxSide",
}
# AdamW's learning rate moves no weight, so that every step has the first one's gradient; 0 might be folded away.
ADAMW = {"rate": 1e-12, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
# Steps before the gate: PyTorch's fourth is captured.
WARM = 6
# Steps of a sample, of which the last is waited for, as in a loop: the host is ahead.
BLOCK, PLAN = 20, TimingPlan(warmup=1, repeats=8, seconds=1.0, most=20)
Gradients = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class FrameworkJob:
    """Step of one framework.

    Attributes:
        framework: one of `SIDES`.
        name: of the loss, such as `MeanFlow 25%`.
        ratio: share of the samples in the JVP.
        count: their number.
        weighting_power, weighting_eps: of the adaptive weight.
        options: the network, its device, precision and batch.
        known: machine rates and operations of one image, as the parent measured them.
        folder: where the parent wrote the weights and references; see `written`.
        tolerance: largest relative error.
        attention: in JAX, of the samples without a derivative: `xla` or `cudnn`.
        split: in PyTorch, `shared`, one pass over all samples, or `static`, two as JAX has them.

    """

    framework: str
    name: str
    ratio: float
    count: int
    weighting_power: float
    weighting_eps: float
    options: StepOptions
    known: tuple[Ceilings, int]
    folder: Path
    tolerance: float
    attention: Literal["xla", "cudnn"] = "xla"
    split: Literal["shared", "static"] = "shared"

    @property
    def by(self) -> str:
        """The framework, and what is special about it."""
        special = {"cuDNN's attention": self.attention == "cudnn", "two passes": self.split == "static"}
        return ", ".join([self.framework, *(name for name, has in special.items() if has)])

    @property
    def reference(self) -> Path:
        """File of the batch with its loss and gradients in fp64."""
        return self.folder / f"{self.name}.npz"


@runtime_checkable
class Side(Protocol):
    """Training step of a framework that is compiled at its first call."""

    def step(self) -> None:
        """Dispatch a step."""
        ...

    def wait(self) -> None:
        """Wait until the device has made it."""
        ...

    def found(self, right: Gradients) -> tuple[float, list[np.ndarray], list[np.ndarray]]:
        """Return the last loss, AdamW's average of the gradients, and the right gradients in the same order."""
        ...

    def peak_bytes(self) -> int | None:
        """Peak memory of a step."""
        ...

    def notes(self) -> dict[str, Any]:
        """Return what else is known of it."""
        ...


@dataclass(frozen=True)
class Measured:
    """Result of a job."""

    timing: Timing
    errors: dict[str, float]
    notes: dict[str, Any]
    code: dict[str, str]


def side_of(job: FrameworkJob) -> Callable[[FrameworkJob, dict[str, np.ndarray]], Side]:
    """Return the class of the job's framework, which is imported here."""
    module, name = SIDES[job.framework].split(":")
    return getattr(import_module(module), name)


def work(parent: Connection, beside: int, job: FrameworkJob) -> None:
    """Run a worker, as one of so many that compile at once: compile and check; wait; time it."""
    share_cores(beside)
    os.environ["JAX_PLATFORMS"] = job.options.device
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # others compile on the same device
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # what compiling takes is measured: nothing is there
        os.environ[name] = str(job.folder / name / slug(f"{job.name} {job.by}"))
    parent.send(measured(job, lambda: await_turn(parent)))


def measured(job: FrameworkJob, turn: Callable[[], None]) -> Measured:
    """Compile, check and time a job's step; `turn` returns when nothing else runs.

    Raises:
        GateError: if its loss or its gradients are not those of fp64.

    """
    with np.load(job.reference) as file:
        reference = dict(file)
    batch = {name: reference.pop(name) for name in ("x", "e", "t", "r")}
    loss = float(reference.pop("loss"))
    say(f"compiling: {job.name}, {job.by}")
    side, start = side_of(job)(job, batch), time.perf_counter()
    for _ in range(WARM):
        side.step()
        side.wait()
    first_ms = 1e3 * (time.perf_counter() - start)
    errors = checked(side, loss, reference, job.tolerance)
    peak, notes = side.peak_bytes(), side.notes()
    turn()
    say(f"timing: {job.name}, {job.by}")

    def block() -> None:
        for _ in range(BLOCK):
            side.step()
        side.wait()

    samples = (ms / BLOCK for ms in measure(block, HostClock(), PLAN).samples_ms)
    return Measured(Timing(first_ms, tuple(samples), peak), errors, notes, joined([]))


def checked(side: Side, loss: float, gradients: Gradients, tolerance: float) -> dict[str, float]:
    """Return the relative errors of the loss and of all gradients together, which AdamW's average tells.

    Raises:
        GateError: for one above the tolerance.

    """
    found, averages, right = side.found(gradients)
    share = 1 - ADAMW["beta1"] ** WARM  # what so many equal gradients sum up to
    squares = [np.square([_norm(a / share - b), _norm(b)]) for a, b in zip(averages, right, strict=True)]
    difference, size = np.sqrt(np.sum(squares, 0))
    errors = {"loss": abs(found - loss) / abs(loss), "gradients": float(difference / size)}
    for name, error in errors.items():
        if not error <= tolerance:
            raise GateError(f"{name}: relative error {error:.2e}, expected at most {tolerance:.2g}; not timed")
    return errors


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))
