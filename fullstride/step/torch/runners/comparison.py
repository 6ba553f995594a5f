"""Gate before training: a step that disagrees with eager fp32 is refused."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.device.precision import (
    exact_fp32,
    rounds_convolutions,
    rounds_products,
    rounds_recurrences,
    unsearched_convolutions,
)
from fullstride.device.triton_compile import compile_only, compiles
from fullstride.step.torch.body import Body, Gradients, total_norm
from fullstride.step.torch.errors import StepError
from fullstride.step.torch.runners.isolated import CannotCopyError, IsolatedBody

Change = Callable[[nn.Module], object]

# Half the digits of the products' format: errors add up in a deep network, a missing or wrong term is off by more.
TOLERANCE = {"fp32": 2.0**-11.5, "tf32": 2.0**-5, "bf16": 2.0**-3.5, "fp16": 2.0**-5}
# Of a loss that rounds by itself, as within an autocast of its own; fp16 and TF32 have the same digits.
OWN_TOLERANCE = {torch.bfloat16: TOLERANCE["bf16"], torch.float16: TOLERANCE["tf32"]}
WORST_OVER_ALL = 8.0  # a single parameter's error may exceed that of all together


@dataclass(frozen=True)
class ReferenceStep:
    """A loss and its gradients by parameter, of those whose gradient can be seen; see `Body.trained`."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    tolerance: float  # by the formats that the loss computes in, although nobody asked for one here


def compile_kernels(body: Body, batch: Any) -> None:
    """Compile the kernels of an eager pass all at once, by a pass on copies; without these, each when it is needed."""
    device = body.device
    if not compiles(device):
        return
    with contextlib.suppress(CannotCopyError):
        isolated = IsolatedBody(body, batch, alone=True)
        with isolated.entered(), compile_only(device):
            isolated.body.gradients(isolated.batch)


def rehearsed(body: Body, batch: Any) -> str:
    """Return why this process cannot compute its own gradients, or ""; leaves no trace and waits for no other."""
    try:
        isolated = IsolatedBody(body, batch, alone=True)
        with isolated.entered():
            isolated.body.gradients(isolated.batch)
    except (CannotCopyError, RuntimeError, StepError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def plain(body: Body) -> Iterator[Body]:
    """Yield the body in fp32, with cuDNN's default convolutions."""
    with exact_fp32(body.device), unsearched_convolutions():
        yield replace(body, precision="fp32")


def reference(body: Body, batch: Any, change: Change | None = None) -> ReferenceStep:
    """Return the loss and gradients that eager fp32 computes for a batch; see `on_copies`."""
    with plain(body) as exact:
        return on_copies(exact, batch, change)


def on_copies(body: Body, batch: Any, change: Change | None = None) -> ReferenceStep:
    """Compute loss and gradients by a pass on copies; collective if several processes train.

    Args:
        body: of the step.
        batch: of the step.
        change: changes weights first.

    Raises:
        CannotCopyError: if there can be no copies, here or on another process.

    """
    isolated, formats = _all_isolated(body, batch), set[torch.dtype]()

    def seen(model: nn.Module, part: Any) -> Any:
        result = isolated.body.loss(model, part)
        formats.update(_formats(result[0] if isinstance(result, tuple) else result))
        return result

    with isolated.entered():
        if change is not None:
            change(isolated.body.model)
        loss = replace(isolated.body, loss=seen).gradients(isolated.batch)["loss"]
    if body.reducer is not None:
        loss = body.processes.mean({"loss": loss})["loss"]
    means = {} if body.reducer is None else body.reducer.means(isolated.gradient)
    # A further hook is somebody else's who sees the gradient first, such as an optimizer's that takes it at once.
    own = int(body.reducer is not None)
    taken = {p for p in body.trained.values() if len(p._post_accumulate_grad_hooks or ()) > own}
    visible = {n: p for n, p in body.trained.items() if p in means or (isolated.has(p) and p not in taken)}
    gradients = {name: dense(means.get(p, isolated.gradient(p))) for name, p in visible.items()}
    return ReferenceStep(loss, gradients, max((OWN_TOLERANCE.get(x, 0.0) for x in formats), default=0.0))


def _formats(loss: Any) -> set[torch.dtype]:
    """Return the formats of all that a loss is differentiated through."""
    nodes, known, formats = [getattr(loss, "grad_fn", None)], set[Any](), set[torch.dtype]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in known:
            known.add(node)
            formats.update(result.dtype for result in node._input_metadata)
            nodes.extend(following for following, _ in node.next_functions)
    return formats


def _all_isolated(body: Body, batch: Any) -> IsolatedBody:
    """Make copies on all processes or on none: a process that went on alone would wait for the others."""
    try:
        isolated, why = IsolatedBody(body, batch), ""
    except CannotCopyError as error:
        isolated, why = None, str(error)
    if why := next(filter(None, [why] if body.reducer is None else body.reducer.processes.gather(why)), ""):
        raise CannotCopyError(why)
    assert isolated is not None
    return isolated


def dense(gradient: Any) -> Any:
    """Convert a sparse gradient to a dense one."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def clipped(body: Body, step: ReferenceStep) -> ReferenceStep:
    """Return a step whose gradients are clipped as the body's."""
    assert body.clip is not None
    stepped = {id(p) for group in body.optimizer.param_groups for p in group["params"]}
    own = {n: g.clone() for n, g in step.gradients.items() if g is not None and id(body.trained[n]) in stepped}
    body.clip([SimpleNamespace(grad=g) for g in own.values()], total_norm(list(own.values())))
    return replace(step, gradients=step.gradients | own)


def overflows(body: Body, loss: Tensor, gradients: Gradients | None) -> bool:
    """Return whether the scale of a finite loss is too large yet: the step is skipped, and says nothing."""
    if body.scaler is None or not bool(loss.isfinite()):
        return False
    return not all(bool(dense(g).isfinite().all()) for g in gradients or () if g is not None)


def _exact(tensor: Tensor) -> Tensor:
    """Convert to fp64; complex numbers stay complex."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def compare(body: Body, expected: ReferenceStep, loss: Tensor, gradients: Gradients | None, what: str) -> float:
    """The relative error of all gradients together; NaN if eager fp32 has no finite ones: a guard tells of that.

    Args:
        body: of the step.
        expected: by eager fp32.
        loss: the step's.
        gradients: the step's, of the parameters that `body.trained` names; None if they cannot be seen.
        what: is compared.

    Raises:
        StepError: if the loss, all gradients or a parameter's are off by more than the format explains.

    """
    by_format = TOLERANCE[_format_of(body.precision, body.model, body.device)]
    allowed, wanted_of = max(by_format, expected.tolerance), expected.gradients
    if not all(bool(x.isfinite().all()) for x in (expected.loss, *wanted_of.values()) if x is not None):
        return math.nan
    wanted_loss, found_loss = expected.loss.item(), loss.item()
    told = f"{what}: the loss is {found_loss:.6g}, eager fp32's {wanted_loss:.6g}"
    if not abs(found_loss - wanted_loss) <= allowed * abs(wanted_loss):
        _require(told, abs(found_loss - wanted_loss), max(abs(wanted_loss), _sensitivity(body, expected)), allowed)
    if gradients is None:
        return abs(found_loss - wanted_loss) / abs(wanted_loss) if wanted_loss else 0.0
    given = zip(body.trained, map(dense, gradients), strict=True)
    pairs = [(name, found, wanted_of[name]) for name, found in given if name in wanted_of]
    for name, found, wanted in pairs:
        if (found is None) != (wanted is None):
            raise StepError(f"{what}: {name} has {'no' if found is None else 'a'} gradient, other than in eager fp32")
    given = [(n, a, b) for n, a, b in pairs if a is not None and b is not None]
    size, count = math.hypot(*(_exact(b).norm().item() for *_, b in given)), max(1, len(given))
    errors = {n: (_exact(a) - _exact(b)).norm().item() for n, a, b in given}
    total = math.hypot(*errors.values())
    worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else math.inf, default="")
    _require(f"{what}: the gradients differ most at {worst}", total, size, allowed)
    for name, _, wanted in given:
        # A parameter that hardly matters may be all rounding.
        scale = max(_exact(wanted).norm().item(), size / count)
        _require(f"{what}: the gradient of {name} differs", errors[name], scale, WORST_OVER_ALL * allowed)
    return total / size if size else 0.0


def _format_of(precision: str, model: nn.Module, device: torch.device) -> str:
    """Return the format of a step's products: fp32 means what PyTorch makes of it, by default TF32 for convolutions."""
    if precision != "fp32" or device.type != "cuda":
        return precision
    convolves = any(p.ndim > 2 for p in model.parameters())
    recurs = any(isinstance(m, nn.RNNBase) for m in model.modules())
    rounds = rounds_products() or (convolves and rounds_convolutions()) or (recurs and rounds_recurrences())
    return "tf32" if rounds else "fp32"


def _sensitivity(body: Body, expected: ReferenceStep) -> float:
    """Return the first-order change of the loss if each weight changes by its own magnitude: sum |g w|.

    A loss that cancels to next to nothing, as PPO's first, is off by rounding of the terms and not of their sum.
    """
    pairs = [(body.trained[name], gradient) for name, gradient in expected.gradients.items()]
    return sum(float((_exact(w.detach()) * _exact(g)).abs().sum()) for w, g in pairs if g is not None)


def _require(what: str, error: float, size: float, allowed: float) -> None:
    if not error <= allowed * size:
        share = error / size if size else math.inf
        raise StepError(
            f"{what}: relative error {share:.2e}, expected at most {allowed:.2g}. Not trained: use backend=eager or "
            "precision=fp32, or, if the loss draws random numbers of its own, draw them in `draw`; "
            "check_first_step=False compares nothing"
        )
