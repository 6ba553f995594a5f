"""What `jvp` says to the ops and layers that run inside it."""

from collections.abc import Iterator
from contextlib import contextmanager

# Read where an op is called, also by the compiler, which guards on them.
_tangent_grad = True
_gradient_inside: bool | None = None
_routing = False


class GradientInside(Exception):  # noqa: N818, as it is no failure
    """A gradient is taken where its own tangent may be wanted: primals must know of their tangents there."""


def tangent_grad() -> bool:
    """Whether gradients may be wanted through the tangents that are computed now; always, outside of `jvp`."""
    return _tangent_grad


def computes_apart() -> bool:
    """Whether primals may be computed without their tangents: not outside of `jvp`, where nobody looks for gradients
    that are taken inside of the function and whose tangents would be lost.
    """
    return _gradient_inside is False


def gradient_inside() -> bool:
    """Whether the function inside `jvp` takes gradients, so that its operations need all their derivatives."""
    return _gradient_inside is True


def inside_jvp() -> bool:
    """Whether `jvp` runs."""
    return _gradient_inside is not None


@contextmanager
def computing(gradients: bool, inside: bool) -> Iterator[None]:
    """Say whether gradients of tangents may be wanted, and whether the function takes gradients itself."""
    global _tangent_grad, _gradient_inside
    before, was_inside = _tangent_grad, _gradient_inside
    _tangent_grad = gradients
    _gradient_inside = inside
    try:
        yield
    finally:
        _tangent_grad = before
        _gradient_inside = was_inside


@contextmanager
def routing() -> Iterator[bool]:
    """Yield whether calls are routed from here on, and were not before."""
    global _routing
    before, _routing = _routing, True
    try:
        yield not before
    finally:
        _routing = before
