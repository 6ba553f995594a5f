"""The gate in front of training: a step that disagrees with eager fp32 is refused."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.ahead import compiles, gathered
from fullstride.precision import ieee, unsearched_convolutions
from fullstride.step.torch.body import Body, Metrics
from fullstride.step.torch.runner import Runner

# Half the digits of the products' format: errors add up in a deep network, a missing or wrong term is off by more.
TOLERANCE = {"fp32": 2.0**-11.5, "tf32": 2.0**-5, "bf16": 2.0**-3.5}
WORST_OVER_ALL = 8.0  # a single parameter's error may exceed that of all together


class StepError(ValueError):
    """A step is wrong; the message names what is off and by how much."""


@dataclass(frozen=True)
class Reference:
    """What eager fp32 makes of a batch: the loss and the clipped gradients."""

    loss: Tensor
    gradients: list[Tensor | None]


@contextlib.contextmanager
def _unchanged(body: Body) -> Iterator[None]:
    """Random numbers and buffers afterwards as they were."""
    device = next(body.model.parameters()).device
    state = None if body.generator is None else body.generator.get_state()
    buffers = [b.clone() for b in body.model.buffers()]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        if body.generator is not None and state is not None:
            body.generator.set_state(state)
        for buffer, old in zip(body.model.buffers(), buffers, strict=True):
            buffer.copy_(old)


def compile_kernels(body: Body, batch: Any) -> None:
    """Compile the kernels of an eager pass all at once, by a pass of which nothing else stays."""
    device = next(body.model.parameters()).device
    if compiles(device):
        # Parts of gradients are all that fits where processes share them out.
        alone = body if body.shards is not None else replace(body, reducer=None)
        try:
            with _unchanged(body), gathered(device):
                alone.gradients(batch)
        finally:
            body.clear()


def rehearsed(body: Body, batch: Any) -> str:
    """Why this process cannot compute its own gradients, "" if it can; nothing stays, and no other is waited for."""
    try:
        with _unchanged(body):
            replace(body, reducer=None).gradients(batch)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        body.clear()
    return ""


@contextlib.contextmanager
def _plain(body: Body) -> Iterator[Body]:
    """The body in fp32, where convolutions are those that cuDNN knows of."""
    with ieee(next(body.model.parameters()).device), unsearched_convolutions():
        yield replace(body, precision="fp32")


def compile_reference(body: Body, batch: Any) -> None:
    """`compile_kernels` of the step that `reference` makes."""
    with _plain(body) as plain:
        compile_kernels(plain, batch)


def reference(body: Body, batch: Any) -> Reference:
    """Eager fp32's step, of which nothing stays."""
    with _plain(body) as plain, _unchanged(body):
        loss = plain.gradients(batch)["loss"]
        plain.clipped()
    # Processes that share memory write the next step's means where these lie.
    kept = lambda x: x if x is None or body.reducer is None else x.clone()  # noqa: E731
    gradients = [kept(p.grad) for p in body.trained.values()]
    body.clear()
    return Reference(loss, gradients)


def _exact(tensor: Tensor) -> Tensor:
    """In fp64, complex numbers as such."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _norm(tensors: list[Tensor]) -> float:
    return torch.stack([_exact(t).norm() for t in tensors]).norm().item()


def compare(body: Body, expected: Reference, loss: Tensor, gradients: list[Tensor | None], what: str) -> float:
    """The relative error of all gradients together; NaN where eager fp32 has none: a guard tells of that.

    Raises:
        StepError: if the loss, all gradients or a parameter's are off by more than the format explains.

    """
    allowed = TOLERANCE[body.precision]
    if not all(bool(x.isfinite().all()) for x in (expected.loss, *expected.gradients) if x is not None):
        return math.nan
    wanted_loss, found_loss = expected.loss.item(), loss.item()
    told = f"{what}: the loss is {found_loss:.6g}, eager fp32's {wanted_loss:.6g}"
    if not abs(found_loss - wanted_loss) <= allowed * abs(wanted_loss):
        _require(told, abs(found_loss - wanted_loss), max(abs(wanted_loss), _sensitivity(body, expected)), allowed)
    pairs = [(n, a, b) for n, a, b in zip(body.trained, gradients, expected.gradients, strict=True)]
    for name, found, wanted in pairs:
        if (found is None) != (wanted is None):
            raise StepError(f"{what}: {name} has {'no' if found is None else 'a'} gradient, other than in eager fp32")
    given = [(n, a, b) for n, a, b in pairs if a is not None and b is not None]
    size, count = _norm([b for *_, b in given]), max(1, len(given))
    errors = {n: (_exact(a) - _exact(b)).norm().item() for n, a, b in given}
    total = math.hypot(*errors.values())
    worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else math.inf, default="")
    _require(f"{what}: the gradients differ most at {worst}", total, size, allowed)
    for name, _, wanted in given:
        # A parameter that hardly matters may be all rounding.
        scale = max(_exact(wanted).norm().item(), size / count)
        _require(f"{what}: the gradient of {name} differs", errors[name], scale, WORST_OVER_ALL * allowed)
    return total / size if size else 0.0


def _sensitivity(body: Body, expected: Reference) -> float:
    """What a loss changes by, to first order, if each weight does by as much as it is: sum |g w|.

    A loss that cancels to next to nothing, as PPO's first, is off by rounding of the terms and not of their sum.
    """
    pairs = zip(body.trained.values(), expected.gradients, strict=True)
    return sum(float((_exact(w.detach()) * _exact(g)).abs().sum()) for w, g in pairs if g is not None)


def _require(what: str, error: float, size: float, allowed: float) -> None:
    if not error <= allowed * size:
        share = error / size if size else math.inf
        raise StepError(
            f"{what}: relative error {share:.2e}, expected at most {allowed:.2g}. Not trained: use backend=eager or "
            "precision=fp32, or, if the loss draws random numbers of its own, draw them in `draw`; gate=False compares "
            "nothing"
        )


@contextlib.contextmanager
def _other_weights(model: nn.Module, change: Callable[[nn.Module], object]) -> Iterator[None]:
    """The model with weights that are changed in place, and its own again afterwards."""
    kept = [p.detach().clone() for p in model.parameters()]
    change(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, old in zip(model.parameters(), kept, strict=True):
                p.copy_(old)


def compared_elsewhere(
    compiled: Body, body: Body, batch: Any, change: Callable[[nn.Module], object], what: str
) -> float:
    """The error of a compiled loss and its gradients with other weights; no step is made.

    Raises:
        StepError: if they disagree with eager fp32.

    """
    with _other_weights(body.model, change):
        expected = reference(body, batch)
        with _unchanged(body):
            loss = compiled.gradients(batch)["loss"]
            compiled.clipped()
            error = compare(body, expected, loss, [p.grad for p in body.trained.values()], what)
        body.clear()
    return error


def gated(runner: Runner, body: Body, batch: Any, made: int, what: str) -> tuple[Metrics, float]:
    """One step of a runner that is compared with eager fp32, and its error.

    Raises:
        StepError: if they disagree; the step was made.

    """
    expected = reference(body, batch)
    metrics = runner(batch, made)
    return metrics, compare(body, expected, metrics["loss"], _undivided(body, runner.gradients()), what)


def _undivided(body: Body, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """A step's gradients before the optimizer divided them as the guard told it; where it skipped, it divided none."""
    divisor = None if body.guard is None else getattr(body.optimizer, "grad_scale", None)
    if divisor is None or float(divisor) == 1 or bool(getattr(body.optimizer, "found_inf", False)):
        return gradients
    return [None if x is None else x * divisor for x in gradients]
