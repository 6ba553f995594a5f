"""The derivative of a function along a direction from its values alone, in fp64."""

from collections.abc import Callable

import torch
from torch import Tensor

Points = list[Tensor]
FIRST_STEP = 2.0**-5  # in units of the largest tangent
HALVINGS = 16
CONVERGED = 1e-9  # the relative change at which a further halving would soon add rounding


def differences(f: Callable[..., Points], primals: Points, tangents: Points) -> tuple[Points, Points]:
    """Central differences, extrapolated (Richardson, Ridders), and how sure they are.

    The step is halved until the estimate stops changing. Of three successive steps the errors of orders 2 and 4 are
    eliminated; more steps are not, as a kink that the wider ones met would stay in the result.

    Returns:
        The derivative of each output, and for each element how much the last halving changed it.

    """
    largest = max(float(t.abs().max()) for t in tangents if t.numel())
    step = FIRST_STEP / largest if largest else FIRST_STEP
    rows: list[list[Points]] = []
    best: tuple[float, Points, Points] | None = None
    for k in range(HALVINGS):
        h = step / 2**k
        ahead, behind = (f(*(p + s * t for p, t in zip(primals, tangents, strict=True))) for s in (h, -h))
        slopes = [(a - b) / (2 * h) for a, b in zip(ahead, behind, strict=True)]
        rows.append(_row(slopes, rows[-1] if rows else []))
        if k < 2:
            continue
        change = [(a - b).abs() for a, b in zip(rows[-1][-1], rows[-2][-1], strict=True)]
        size = _norm(change) / max(_norm(rows[-1][-1]), torch.finfo(torch.float64).tiny)
        if best is None or size < best[0]:
            best = size, rows[-1][-1], change
        if size < CONVERGED:
            break
    assert best is not None
    return best[1], best[2]


def _row(slopes: Points, before: list[Points]) -> list[Points]:
    """Slopes at this step and their extrapolations with those of the step before."""
    row = [slopes]
    for order, wider in zip((4, 16), before, strict=False):
        row.append([(order * a - b) / (order - 1) for a, b in zip(row[-1], wider, strict=True)])
    return row


def _norm(tensors: Points) -> float:
    return float(sum(x.square().sum() for x in tensors)) ** 0.5
