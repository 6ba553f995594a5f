"""A copy of all that a step changes, to return to."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.step.torch.body import Body
from fullstride.step.torch.optimizers import layers


class Saved:
    """Weights, buffers, averages, the optimizer's and the guard's state and random numbers at one moment.

    Attributes of modules and of the optimizer are kept, too, as what they were bound to.
    """

    def __init__(self, body: Body, guarded: Sequence[Tensor] = ()):
        """Copy them; `guarded` are the tensors that the guard writes."""
        self._body, self._guarded = body, guarded
        self._tensors = [(x, x.detach().clone()) for x in self._live()]
        self._optimizers: list[Any] = layers(body.optimizer)
        self._states = [{p: dict(own) for p, own in each.state.items()} for each in self._optimizers]
        own = [*map(vars, self._optimizers), *body.optimizer.param_groups, *_attributes(body.model)]
        self._dicts = [(each, dict(each)) for each in own]
        self._host = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._generator = None if body.generator is None else body.generator.get_state()

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


def _attributes(model: nn.Module) -> list[dict[str, Any]]:
    return [own for module in model.modules() for own in (vars(module), module._buffers)]
