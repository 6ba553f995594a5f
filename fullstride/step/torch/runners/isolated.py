"""A step's loss on copies of all state that it reaches, so that an extra pass leaves no trace."""

import copy
import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullstride.step.torch.body import Body
from fullstride.step.torch.runners.reached_state import Reached


class CannotCopyError(Exception):
    """Some state that a loss reaches cannot be copied, such as an iterator, a file or a lock."""


class Isolated:
    """A body and a batch that share no state with a training; to be run within `entered`.

    Attributes:
        body: with copies of the model, its generator, and the loss and `draw` where these are objects; its gradients
            are this process's own.
        batch: a copy.

    """

    def __init__(self, body: Body, batch: Any):
        """Copy what they lead to.

        Raises:
            CannotCopyError: with what cannot be copied.

        """
        reached = Reached((body.loss, body.draw, body.model, body.generator, batch))
        self._variables, self._device = reached.variables, body.device
        self._memo: dict[int, Any] = {id(module): module for module in reached.modules}
        self._memo |= {id(g): g.clone_state() for g in reached.generators}
        # A tensor within a graph has no other copy than its values, and a batch may be a view of all data.
        apart = [x for x in reached.tensors if not x.is_leaf] + Reached([batch]).tensors
        self._memo |= {id(x): x.detach().clone() for x in apart}
        self.batch = self._copied(batch, "the batch")
        parts = {name: self._copied(getattr(body, name), name) for name in ("loss", "draw", "model", "generator")}
        self._values = [self._copied(v.value, v.name) for v in self._variables]
        for x in reached.tensors:
            for hook in (x._backward_hooks or {}).values() if x.is_leaf else ():
                self._memo[id(x)].register_hook(hook)
        self.body = replace(body, reducer=None, shards=None, **parts)

    def _copied(self, x: Any, name: str) -> Any:
        try:
            return copy.deepcopy(x, self._memo)
        except Exception as error:
            raise CannotCopyError(f"{name} cannot be copied ({type(error).__name__}: {error})") from error

    def has(self, parameter: Tensor) -> bool:
        """Whether a parameter was copied."""
        return id(parameter) in self._memo

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient of a parameter's copy, if there is one."""
        return self._memo[id(parameter)].grad if self.has(parameter) else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let functions read copies of their variables; variables and random numbers are as they were afterwards."""
        numpy_state, python_state = np.random.get_state(), random.getstate()
        with ExitStack() as stack:
            stack.callback(np.random.set_state, numpy_state)
            stack.callback(random.setstate, python_state)
            stack.enter_context(torch.random.fork_rng([self._device] if self._device.type == "cuda" else []))
            stack.enter_context(warnings.catch_warnings())  # which the step itself is going to give
            warnings.simplefilter("ignore")
            for variable, value in zip(self._variables, self._values, strict=True):
                stack.callback(variable.bind, variable.value)
                variable.bind(value)
            yield
