"""Evaluates a function of many leaves on stacks of them: an equation that is the same for all leaves runs once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Literal, jaxpr_as_fun

# Calls whose insides are evaluated in place.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


@dataclass(eq=False, slots=True)
class StackedLeaf:
    """Leaf of a stack, in which the leaves of a group lie along a new first axis."""

    stack: Any
    index: int


class Batched:
    """Evaluator of a jaxpr that was traced on leaves, with stacks in their place.

    An equation whose operands are lanes of one index runs for the whole stack under `jax.vmap`; the same equation on
    another lane finds its result there. What mixes lanes of several indices, as a global norm does, takes them out of
    their stacks, and so does every scalar that follows from that. So the result is that of the function on its leaves,
    whatever the function is, and equal work is done once.
    """

    def __init__(self) -> None:
        self._results: dict[Any, list[Any]] = {}
        self._leaves: dict[tuple[int, int], Any] = {}
        # What is known by its identity must stay alive.
        self._kept: list[Any] = []
        # Values that come from lanes taken out of their stacks.
        self._global: set[int] = set()

    def run(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Return the outputs of a jaxpr, stacked where possible."""
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
        for equation in jaxpr.eqns:
            inputs = [x if isinstance(x, Literal) else values[x] for x in equation.invars]
            values.update(zip(equation.outvars, self._equation(jaxpr, equation, inputs), strict=True))
        return [x if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]

    def leaf(self, value: Any) -> Any:
        """A lane taken out of its stack, a literal's value; anything else is itself."""
        if isinstance(value, Literal):
            return value.val
        if not isinstance(value, StackedLeaf):
            return value
        key = (id(value.stack), value.index)
        if key not in self._leaves:
            self._kept.append(value.stack)
            self._leaves[key] = jax.lax.index_in_dim(value.stack, value.index, keepdims=False)
        return self._leaves[key]

    def _equation(self, jaxpr: Any, equation: Any, inputs: list[Any]) -> list[Any]:
        inside = CALLS.get(equation.primitive.name)
        if inside is not None and not equation.effects:
            closed = equation.params[inside]
            return self.run(closed.jaxpr, closed.consts, inputs)
        function = _function(jaxpr, equation)
        values = [v for v, x in zip(inputs, equation.invars, strict=True) if not isinstance(x, Literal)]
        if self._apart(equation, values):
            return self._spread(function(*map(self.leaf, values)))
        key = _key(equation, inputs)
        lanes = [x for x in values if isinstance(x, StackedLeaf)]
        if key not in self._results:
            self._kept += inputs
            self._results[key] = _stacked(function, values) if lanes else function(*map(self.leaf, values))
            if not lanes and any(id(x) in self._global for x in values):
                self._spread(self._results[key])
        results = self._results[key]
        return [StackedLeaf(x, lanes[0].index) for x in results] if lanes else results

    def _apart(self, equation: Any, values: list[Any]) -> bool:
        """Return whether an equation has to be evaluated leaf by leaf."""
        lanes = [x for x in values if isinstance(x, StackedLeaf)]
        if equation.effects or len({(x.index, len(x.stack)) for x in lanes}) > 1:
            return True
        scalar = all(x.aval.shape == () for x in equation.outvars)
        return bool(lanes) and scalar and any(id(x) in self._global for x in values)

    def _spread(self, results: list[Any]) -> list[Any]:
        self._kept += results
        self._global.update(map(id, results))
        return results


def _function(jaxpr: Any, equation: Any) -> Callable[..., list[Any]]:
    """One equation as a function of its operands but for literals."""
    names = [x for x in equation.invars if not isinstance(x, Literal)]
    outputs = [x for x in equation.outvars if not isinstance(x, DropVar)]
    alone = jaxpr.replace(constvars=[], invars=list(dict.fromkeys(names)), outvars=outputs, eqns=[equation])
    evaluate = jaxpr_as_fun(ClosedJaxpr(alone, []))

    def function(*operands: Any) -> list[Any]:
        found = iter(evaluate(*dict(zip(names, operands, strict=True)).values()))
        return [None if isinstance(x, DropVar) else next(found) for x in equation.outvars]

    return function


def _stacked(function: Callable[..., list[Any]], values: list[Any]) -> list[Any]:
    axes = [0 if isinstance(x, StackedLeaf) else None for x in values]
    stacks = [x.stack if isinstance(x, StackedLeaf) else x.val if isinstance(x, Literal) else x for x in values]
    return jax.vmap(function, in_axes=axes)(*stacks)


def _key(equation: Any, inputs: list[Any]) -> Any:
    """Return a key that two equations share if they differ only in the index of their leaf."""
    params = tuple(sorted(equation.params.items()))
    try:
        hash(params)
    except TypeError:
        return object()
    return equation.primitive.name, params, tuple(map(_operand, inputs))


def _operand(x: Any) -> Any:
    if isinstance(x, StackedLeaf):
        return "lane", id(x.stack)
    if not isinstance(x, Literal):
        return "value", id(x)
    # By all its digits, which no repr has; an array may be one of the program's constants, which are many.
    return ("literal", str(x.aval), np.asarray(x.val).tobytes() if np.shape(x.val) == () else id(x.val))
