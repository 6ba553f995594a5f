"""Whether a program calls back to the host, as `equinox.error_if` does."""

from typing import Any

from jax.extend import core


def calls_back(jaxpr: Any) -> bool:
    """Whether any equation of a jaxpr, however deep, is a callback."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return any("callback" in e.primitive.name for e in jaxpr.eqns) or any(map(calls_back, core.subjaxprs(jaxpr)))
