"""A copy of all that a step changes, to return to."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fullstride.step.torch.averages import Averages
from fullstride.step.torch.body import Body


class Saved:
    """Weights, buffers, averages, the optimizer's and the guard's state and random numbers at one moment."""

    def __init__(self, body: Body, averages: Averages, guarded: Sequence[Tensor] = ()):
        """Copy them; `guarded` are the tensors that the guard writes."""
        self._body, self._averages, self._guarded = body, averages, guarded
        self._tensors = [(x, x.detach().clone()) for x in self._live()]
        self._state = {p: dict(own) for p, own in body.optimizer.state.items()}
        self._host = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._generator = None if body.generator is None else body.generator.get_state()

    def _live(self) -> list[Tensor]:
        model, averages = self._body.model, self._averages
        state = [x for own in self._body.optimizer.state.values() for x in own.values() if isinstance(x, Tensor)]
        followed = [x for decay, m in averages.models.items() for x in (*averages.tensors(decay), *m.buffers())]
        return [*model.parameters(), *model.buffers(), *followed, *state, *self._guarded]

    @torch.no_grad()
    def restore(self) -> None:
        """Return to that moment; what the optimizer has begun to keep since is forgotten."""
        for live, old in self._tensors:
            live.copy_(old)
        self._body.optimizer.state.clear()
        self._body.optimizer.state.update({p: dict(own) for p, own in self._state.items()})
        torch.set_rng_state(self._host)
        if self._device is not None:
            torch.cuda.set_rng_state(self._device)
        if self._body.generator is not None and self._generator is not None:
            self._body.generator.set_state(self._generator)
