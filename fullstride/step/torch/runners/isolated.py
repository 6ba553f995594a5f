"""A step's loss on copies of all state that it reaches, so that an extra pass leaves no trace.

`Snapshot` copies all that a step changes, to return to.
"""

import copy
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullstride.step.torch.body import Body
from fullstride.step.torch.distributed.processes import SINGLE
from fullstride.step.torch.optimizers import layers
from fullstride.step.torch.runners.reached_state import ReachableState, ReadVariable


class CannotCopyError(Exception):
    """State that a loss reaches but that cannot be copied, such as an iterator, a file or a lock."""


class IsolatedBody:
    """A body and a batch that share no state with a training; to be run within `entered`.

    Attributes:
        body: with copies of the model, its generator, and the loss and `draw` where these are objects; its gradients
            are this process's own, of the loss without a scale.
        batch: a copy.

    """

    def __init__(self, body: Body, batch: Any, *, alone: bool = False):
        """Copy everything that they lead to.

        Args:
            body: of a step.
            batch: of a step.
            alone: whether not to meet other processes even for the sum of the micro-batches' weights.

        Raises:
            CannotCopyError: for state that cannot be copied.

        """
        reached = ReachableState((body.loss, body.draw, body.model, body.generator, batch))
        self._device = body.device
        self._memo: dict[int, Any] = {id(module): module for module in reached.modules}
        self._memo |= {id(g): g.clone_state() for g in reached.generators}
        # A tensor within a graph has no other copy than its values, and a batch may be a view of all data.
        apart = [x for x in reached.tensors if not x.is_leaf] + ReachableState([batch]).tensors
        self._memo |= {id(x): x.detach().clone() for x in apart}
        self.batch = self._copied(batch, "the batch")
        parts = {name: self._copied(getattr(body, name), name) for name in ("loss", "draw", "model", "generator")}
        copies = [(v, self._copied(v.value, v.name)) for v in reached.variables]
        self._copies = [(v, value) for v, value in copies if self._binds(v, value)]
        for x in reached.tensors:
            for hook in (x._backward_hooks or {}).values() if x.is_leaf else ():
                self._memo[id(x)].register_hook(hook)
        processes = SINGLE if alone else body.processes
        self.body = replace(body, processes=processes, reducer=None, shards=None, scaler=None, **parts)

    def _copied(self, x: Any, name: str) -> Any:
        try:
            return copy.deepcopy(x, self._memo)
        except Exception as error:
            raise CannotCopyError(f"{name} cannot be copied ({type(error).__name__}: {error})") from error

    @staticmethod
    def _binds(variable: ReadVariable, value: Any) -> bool:
        """Return whether the variable can be bound; a read-only one may be its own copy, as an enumeration's member."""
        try:
            variable.bind(variable.value)
        except Exception as error:
            if value is variable.value:
                return False
            raise CannotCopyError(f"{variable.name} cannot be bound ({type(error).__name__}: {error})") from error
        return True

    def has(self, parameter: Tensor) -> bool:
        """Return whether a parameter was copied."""
        return id(parameter) in self._memo

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of a parameter's copy, if there is one."""
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
            for variable, value in self._copies:
                stack.callback(variable.bind, variable.value)
                variable.bind(value)
            yield


class Snapshot:
    """Weights, buffers, averages, the optimizer's and the guard's state and random numbers at one moment.

    Attributes of modules and of the optimizer are kept, too, as what they were bound to.
    """

    def __init__(self, body: Body, guarded: Sequence[Tensor] = ()):
        """Copy them; `guarded` are the tensors that the guard writes."""
        self._body, self._guarded = body, guarded
        self._tensors = [(x, x.detach().clone()) for x in self._live()]
        self._optimizers: list[Any] = layers(body.optimizer)
        self._states = [{p: dict(own) for p, own in each.state.items()} for each in self._optimizers]
        own = [*map(vars, self._optimizers), *body.optimizer.param_groups]
        own += [each for module in body.model.modules() for each in (vars(module), module._buffers)]
        self._dicts = [(each, dict(each)) for each in own]
        self._host = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._generator = None if body.generator is None else body.generator.get_state()
        self._scale = None if body.scaler is None else body.scaler.state_dict()

    def _live(self) -> list[Tensor]:
        model, averages, groups = self._body.model, self._body.ema, self._body.optimizer.param_groups
        states = [own for each in layers(self._body.optimizer) for own in each.state.values()]
        kept = [value for own in (*states, *groups) for value in own.values()]
        given = [p for group in groups for p in group["params"]]
        followed = [x for decay, m in averages.models.items() for x in (*averages.tensors(decay), *m.buffers())]
        found = [*model.parameters(), *model.buffers(), *given, *followed, *kept, *self._guarded]
        return list({id(x): x for x in found if isinstance(x, Tensor)}.values())

    @torch.no_grad()
    def restore(self) -> None:
        """Return to that moment; what the optimizer has begun to keep since is forgotten."""
        for live, old in self._tensors:
            for dim, stride in enumerate(live.stride()):
                if not stride and live.numel():  # an expanded tensor, which has each number once
                    live, old = live.narrow(dim, 0, 1), old.narrow(dim, 0, 1)
            live.copy_(old)
        for live, old in self._dicts:
            live.clear()
            live.update(old)
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update({p: dict(own) for p, own in state.items()})
        torch.set_rng_state(self._host)
        if self._device is not None:
            torch.cuda.set_rng_state(self._device)
        if self._body.generator is not None and self._generator is not None:
            self._body.generator.set_state(self._generator)
        if self._body.scaler is not None and self._scale:
            self._body.scaler.load_state_dict(self._scale)
