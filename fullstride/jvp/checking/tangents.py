"""`check_tangents`: a derivative as it runs, compared with fp64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fullstride.device.precision import rounds_convolutions, rounds_products
from fullstride.jvp.checking.finite_difference import differences
from fullstride.jvp.checking.float64 import CoarsestFormat, in_float64, on_copies, to_float64
from fullstride.jvp.transform import jvp
from fullstride.measure.text import aligned

PLAIN = "plain operations in fp64"
EXACT = f"torch.func.jvp of {PLAIN}"
VALUES = "central differences in fp64"
REFERENCE_TOLERANCE = 1e-6  # of the derivative in fp64 against differences: their rounding, with a wide margin
WORST_OVER_RMS = 5.0  # the largest of a million normal errors, in standard deviations
TF32_EPS = 2.0**-10


class TangentError(ValueError):
    """A forward derivative is wrong; the message names the worst place."""


@dataclass(frozen=True)
class TangentReport:
    """Errors of a derivative against fp64, over all elements, root mean square over root mean square.

    Attributes:
        dtype: coarsest format that occurred during the call.
        tolerance: limit of `output` and `tangent`; a single element may be off by five times as much.
        output: error of fn's output.
        tangent: error of its derivative.
        difference: error of the derivative in fp64 against central differences.
        reference: reference of `tangent`; `difference` is 0 if that was central differences.

    """

    dtype: torch.dtype
    tolerance: float
    output: float
    tangent: float
    difference: float
    reference: str = EXACT

    def __str__(self) -> str:
        """The verdict in a sentence, and every comparison in a table."""
        rows = [
            ("relative error", "found", "allowed"),
            (f"output, against {PLAIN}", f"{self.output:.1e}", f"{self.tolerance:.1e}"),
            (f"tangent, against {self.reference}", f"{self.tangent:.1e}", f"{self.tolerance:.1e}"),
        ]
        if self.reference != VALUES:
            name = "that reference, against differences of values"
            rows.append((name, f"{self.difference:.1e}", f"{REFERENCE_TOLERANCE:.1e}"))
        dtype = str(self.dtype).removeprefix("torch.")
        return f"The derivative agrees with fp64 within the tolerance; coarsest format: {dtype}.\n\n{aligned(rows)}"


def check_tangents(
    fn: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    tolerance: float | None = None,
    transform: Callable[..., tuple[Any, ...]] = jvp,
    values_only: bool = False,
    tangent_grad: bool = False,
) -> TangentReport:
    """Compare fn's derivative, as it will run, with two references, and raise if one disagrees.

    The first is torch.func.jvp of fn in fp64 in PyTorch operations: it finds what a fused kernel, a number format or a
    transform does wrong. The second are values of fn in fp64, central differences: they find what is wrong in every
    format, such as a detached branch or a custom function's own jvp. In fp64 are also parameters, buffers and
    constants, and what fn itself casts to a lower format. fn is called some twenty times, on the primals' device, or
    on the CPU if that has no fp64. Random numbers begin alike at each call and are afterwards as if it had not been
    made, but fp64 draws others than fp32: switch dropout off. fn must be one of eager mode; a `transform` may compile,
    and then the formats inside are not seen: give a tolerance with autocast.

    Args:
        fn: a function of tensors or pytrees of them, such as a module; its buffers stay unchanged.
        primals: arguments of fn, not zero, as zeros hide errors.
        tangents: one tangent for each primal, as in `jvp`.
        tolerance: allowed relative error; by default the square root of the spacing (eps) of the coarsest
            format met: 3.5e-4 in fp32, 3.1e-2 in fp16 and TF32, 8.8e-2 in bf16. Half the digits are left for errors to
            add up in a deep network; a term that is missing or wrong is off by more.
        transform: how the derivative is taken: `jvp`, `torch.func.jvp`, or any function of (fn, primals, tangents).
        values_only: leave the first reference out, for an fn without a forward derivative or a `transform` that needs
            none, such as one that takes differences itself.
        tangent_grad: compare the gradient through the tangent, too: that of a random product with it, by the primals
            along the tangents, with differences of the tangent in fp64. `transform` must keep the tangent's graph.

    Returns:
        The errors.

    Raises:
        TangentError: naming element, value, expected value, relative error and the reference.
        ValueError: if primals and tangents do not fit each other.

    """
    formats, device = CoarsestFormat(), _device(primals)
    with _same_randomness(device):
        output, tangent = transform(_noted(on_copies(fn), formats), primals, tangents)[:2]
    for x in pytree.tree_leaves((primals, output)):
        formats.note(x)
    allowed = _eps(formats.coarsest, device) ** 0.5 if tolerance is None else tolerance
    found = _Exact(fn, primals, tangents, torch.device("cpu") if device.type == "mps" else device, values_only)
    got = [_named(x, found.device) for x in (output, tangent)]
    floors = [allowed * found.sensitivity * _rms(x) for x in found.output.values()]
    errors = (
        _compare("output", got[0], found.output, allowed, PLAIN, [0.0] * len(floors)),
        _compare("tangent", got[1], found.tangent, allowed, VALUES if values_only else EXACT, floors),
        _compare("tangent", found.tangent, found.slopes, REFERENCE_TOLERANCE, VALUES, floors, found.changes),
    )
    if tangent_grad:
        _compare_gradient(fn, (primals, tangents), transform, found, allowed)
    return TangentReport(formats.coarsest, allowed, *errors, VALUES if values_only else EXACT)


def _compare_gradient(
    fn: Callable[..., Any], point: tuple[Any, Any], transform: Callable[..., Any], exact: "_Exact", tolerance: float
) -> None:
    """Raise unless the gradient through the tangent agrees with differences of the tangent."""
    leaves, spec = pytree.tree_flatten(point[0])
    moves = pytree.tree_leaves(point[1])
    moving = [i for i, move in enumerate(moves) if move is not None]
    for i in moving:
        leaves[i] = leaves[i].detach().requires_grad_()
    with torch.enable_grad(), _same_randomness(exact.device):
        tangent = transform(on_copies(fn), pytree.tree_unflatten(leaves, spec), point[1])[1]
    parts = [x for x in pytree.tree_leaves(tangent) if isinstance(x, Tensor) and x.is_floating_point()]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(exact.device) for x in parts]
    product = sum((x.to(exact.device, torch.float64) * w).sum() for x, w in zip(parts, weights, strict=True))
    points = [leaves[i] for i in moving]
    if not isinstance(product, Tensor) or not product.requires_grad:
        found = [torch.zeros_like(x) for x in points]
    else:
        found = torch.autograd.grad(product, points, allow_unused=True, materialize_grads=True)
    along = [_moved(g, exact.device) * _moved(moves[i], exact.device) for g, i in zip(found, moving, strict=True)]
    value, expected = float(sum(x.sum() for x in along)), float(exact.slope_of_tangent(weights))
    size = max(abs(expected), float(sum(x.square().sum() for x in along)) ** 0.5, torch.finfo(torch.float64).tiny)
    if not abs(value - expected) <= WORST_OVER_RMS * tolerance * size:
        raise TangentError(
            f"the gradient through the tangent is {value:.6g} along the tangents, expected {expected:.6g} by "
            f"differences in fp64, to {WORST_OVER_RMS * tolerance:.2e} of it. Torch's own is wrong for norms and "
            "factorisations that jvp does not see; transform must keep the tangent's graph"
        )


def _noted(fn: Callable[..., Any], formats: CoarsestFormat) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler traces modes, too, but not all of their calls
            return fn(*args)
        with formats:
            return fn(*args)

    return run


class _Exact:
    """Output and derivative in fp64, by forward derivatives and by differences."""

    def __init__(
        self, fn: Callable[..., Any], primals: tuple, tangents: tuple, device: torch.device, values_only: bool
    ):
        self.device, exact = device, in_float64(fn, device)
        leaves, spec = pytree.tree_flatten(pytree.tree_map(lambda x: _moved(x, device), primals))
        moves = [_moved(x, device) for x in pytree.tree_leaves(tangents)]
        moving = [i for i, move in enumerate(moves) if move is not None]
        points, directions = [leaves[i] for i in moving], [moves[i] for i in moving]

        def run(*moved: Tensor) -> Any:
            full = list(leaves)
            for i, x in zip(moving, moved, strict=True):
                full[i] = x
            with _same_randomness(device):
                return exact(*pytree.tree_unflatten([x.clone() if isinstance(x, Tensor) else x for x in full], spec))

        with torch.no_grad():
            values = lambda *x: list(_named(run(*x), device).values())  # noqa: E731
            slopes, self.changes = differences(values, points, directions)
            output, tangent = (
                (run(*points), None) if values_only else torch.func.jvp(run, tuple(points), tuple(directions))[:2]
            )
        self._tangent_at = lambda *x: list(_named(torch.func.jvp(run, x, tuple(directions))[1], device).values())
        self._points, self._directions = points, directions
        self.output = _named(output, device)
        self.slopes = dict(zip(self.output, slopes, strict=True))
        self.tangent = self.slopes if values_only else _named(tangent, device)
        smallest = torch.finfo(torch.float64).tiny
        self.sensitivity = max(map(_rms, directions)) / max(max(map(_rms, points)), smallest)

    def slope_of_tangent(self, weights: list[Tensor]) -> Tensor:
        """The derivative of a product with the tangent, along the tangents again, by differences."""

        def product(*x: Tensor) -> list[Tensor]:
            return [
                sum(((a * w).sum() for a, w in zip(self._tangent_at(*x), weights, strict=True)), x[0].new_zeros(()))
            ]

        with torch.no_grad():
            return differences(product, self._points, self._directions)[0][0]


def _compare(
    what: str,
    got: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float,
    reference: str,
    floors: list[float],
    slack: list[Tensor] | None = None,
) -> float:
    """The largest relative error of any tensor, if none is beyond the tolerance."""
    errors = [0.0]
    for i, (name, e) in enumerate(expected.items()):
        off, e = (got[name] - e).abs().nan_to_num(nan=torch.inf), e.nan_to_num(0.0, 0.0, 0.0)
        if slack is not None:
            off = (off - 10 * slack[i]).clamp(min=0)
        least = max(_rms(e), floors[i], torch.finfo(torch.float64).tiny)
        if not e.numel():
            continue
        relative, errors = off / e.abs().clamp(min=least), [*errors, _rms(off) / least]
        if not (relative.max() <= WORST_OVER_RMS * tolerance and errors[-1] <= tolerance):
            values = got[name], expected[name]
            raise TangentError(_message(f"{what}{name}", *values, relative, errors[-1], tolerance, reference))
    return max(errors)


def _message(
    name: str, got: Tensor, expected: Tensor, relative: Tensor, error: float, tolerance: float, reference: str
) -> str:
    place = [int(i) for i in torch.unravel_index(relative.argmax(), relative.shape)]
    value, right = float(got[tuple(place)]), float(expected[tuple(place)])
    return (
        f"{name} is worst at {place}: {value:.6g}, expected {right:.6g} by {reference}; relative error "
        f"{float(relative.max()):.2e} there, {error:.2e} in all, expected at most {tolerance:.2e} in all. "
        + (_REMEDY if reference == VALUES else _REMEDY_EXACT)
    )


_REMEDY = "Look for detach(), no_grad, or a custom function's jvp; fn must not be random"
_REMEDY_EXACT = "Look at fused operations and number formats, or give a tolerance; dropout must be off"


def _same_randomness(device: torch.device) -> Any:
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def _device(primals: tuple[Any, ...]) -> torch.device:
    return next((x.device for x in pytree.tree_leaves(primals) if isinstance(x, Tensor)), torch.device("cpu"))


def _eps(dtype: torch.dtype, device: torch.device) -> float:
    """The spacing of a format's numbers at 1, or of the factors of its products if these are coarser."""
    if dtype == torch.float32 and device.type == "cuda" and (rounds_products() or rounds_convolutions()):
        return TF32_EPS
    return torch.finfo(dtype).eps


def _moved(x: Any, device: torch.device) -> Any:
    return to_float64(x.detach().to(device)) if isinstance(x, Tensor) else x


def _named(tree: Any, device: torch.device) -> dict[str, Tensor]:
    """The floating tensors of a pytree in fp64, by their place in it."""
    leaves = pytree.tree_flatten_with_path(tree)[0]
    tensors = {pytree.keystr(path): x for path, x in leaves if isinstance(x, Tensor) and x.is_floating_point()}
    return {name: _moved(x, device) for name, x in tensors.items()}


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
