"""How far a result is from fp64, beside eager's in the same format."""

from torch import Tensor, finfo

from fullstride.measure.gate import require_close

# Against fp64 a right result may be twice as far off as eager's, or a few roundings of what is stored.
OVER_EAGER, ROUNDINGS = 2.0, 4.0
Errors = dict[str, dict[str, float]]  # by result, then ours and eager's


def error_beside_eager(
    name: str, out: Tensor, exact: Tensor, eager: Tensor | None, rounding: float | None = None
) -> dict[str, float]:
    """Relative errors against fp64, ours and eager's in the same format.

    Args:
        name: of the result.
        out: ours.
        exact: in fp64.
        eager: eager's, if there is one.
        rounding: the relative error of what is rounded; None is that of out's format.

    Raises:
        GateError: if ours is more than twice eager's, and more than a few roundings.

    """
    least = ROUNDINGS * (rounding or finfo(out.dtype).eps)
    found = {} if eager is None else {"eager": require_close(f"{name}, eager", eager, exact, 0.99)}
    return {"ours": require_close(name, out, exact, max(least, OVER_EAGER * found.get("eager", 0.0)))} | found


def merged(found: Errors, more: Errors) -> Errors:
    """The larger of the errors."""
    every = {name: [d.get(name, {}) for d in (found, more)] for name in found | more}
    return {
        name: {who: max(errors.get(who, 0.0) for errors in both) for who in both[0] | both[1]}
        for name, both in every.items()
    }
