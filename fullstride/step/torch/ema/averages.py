"""Exponential moving averages of a network's weights, all of them in one pass over the weights on a GPU."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.step.torch.ema.power import Power

if TYPE_CHECKING:
    from fullstride.step.torch.distributed.shards import Shard

M = TypeVar("M", bound=nn.Module)
Pace = float | Power  # the share that a step keeps, or a power function

# Their spacing is wider than what an average moves in a step: added there, it would be rounded away.
HALF = (torch.bfloat16, torch.float16)


def _followed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which an average of such weights is stored."""
    return torch.float32 if dtype in HALF else dtype


def _copied(model: M) -> M:
    """Copy the network in eval mode, without gradients, its 16-bit numbers in fp32."""
    average = copy.deepcopy(model).eval().requires_grad_(False)
    if any(x.dtype in HALF for x in (*average.parameters(), *average.buffers())):
        average._apply(lambda x: x.to(_followed_in(x.dtype)))
    return average


class SharedAverage:
    """The process's part of an average, and its network, which has weights only within `whole`.

    Attributes:
        own: a tensor for each buffer of weights; they stay where they are.

    """

    def __init__(self, shares: "Sequence[Shard]", parameters: list[list[nn.Parameter]]):
        """Keep this process's parts of a network's parameters, given for each share, and empty them."""
        self._shares, self._parameters = shares, parameters
        self.own = [share.part_of(given) for share, given in zip(shares, parameters, strict=True)]
        self._empty()

    def _empty(self) -> None:
        for parameters in self._parameters:
            for p in parameters:
                p.data = p.data.new_empty(0)

    def _fill(self, tensors: Iterator[list[Tensor]]) -> None:
        for parameters, views in zip(self._parameters, tensors, strict=True):
            for p, view in zip(parameters, views, strict=True):
                p.data = view

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The network with its weights, gathered from all processes; collective."""
        self._fill(share.gathered(own) for share, own in zip(self._shares, self.own, strict=True))
        try:
            yield
        finally:
            self._empty()

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """The network with room for other weights, of which each process keeps its part afterwards."""
        self._fill(share.views(own.dtype) for share, own in zip(self._shares, self.own, strict=True))
        try:
            yield
            with torch.no_grad():
                for share, own, given in zip(self._shares, self.own, self._parameters, strict=True):
                    own.copy_(share.part_of(given))
        finally:
            self._empty()


class Averages(Generic[M]):
    """Copies of the weights that follow the first at different paces: a <- d a + (1 - d) w.

    Updated every `period` steps with d = decay^period, an average forgets as fast as one updated every step: the
    decay belongs to a step, the period is only a matter of cost (the rule of the CIFAR-10 MeanFlow recipe).

    Weights in 16 bits are averaged in fp32, and the averaged networks then compute in it: in bf16 a decay of 0.9999
    would move nothing. `load` takes averages of any format.

    A `Power` keeps ((step - period) / step)^(g + 1) in place of a constant share.

    Attributes:
        models: the averaged networks by their decay or `Power`, in eval mode, without gradients; shared out over
            processes they have weights only within `whole`.

    """

    def __init__(self, model: M, decays: Sequence[Pace], period: int = 1, *, warmup: bool = True):
        """Start from the present weights.

        Args:
            model: the network to follow.
            decays: share of the average that a step keeps, in [0, 1), or a `Power`; one for each average.
            period: optimizer steps between updates.
            warmup: step k keeps at most (1 + k) / (10 + k); otherwise the initial weights would stay for about
                1 / (1 - decay) steps.

        Raises:
            ValueError: for a decay outside [0, 1), or a period below 1.

        """
        if wrong := [decay for decay in decays if not (isinstance(decay, Power) or 0 <= decay < 1)]:
            raise ValueError(f"decays are {wrong}, expected shares in [0, 1), such as 0.999")
        if period < 1:
            raise ValueError(f"period is {period}, expected a number of steps, 1 or more")
        self.models: dict[Pace, M] = {d: _copied(model) for d in decays}
        self.period, self.warmup = period, warmup
        self._weights = [weight.detach() for weight in model.parameters()]
        self._model = model
        self._kernel: Any = None
        self._decays: dict[torch.device, Tensor] = {}
        self._shared: dict[Pace, SharedAverage] = {}

    @property
    def first(self) -> Pace:
        """Decay, or power, of the first average."""
        return next(iter(self.models))

    @property
    def model(self) -> M:
        """Network with the first average."""
        return self.models[self.first]

    def share(self, part: Callable[[M], SharedAverage], weights: list[Tensor]) -> None:
        """Keep only the shard that `part` returns of each network, and average these parts of the weights."""
        self._shared = {decay: part(model) for decay, model in self.models.items()}
        self._weights, self._kernel = weights, None

    @contextmanager
    def whole(self, decay: Pace) -> Iterator[M]:
        """Return the averaged network with all of its weights; collective if it is sharded."""
        if not self._shared:
            yield self.models[decay]
            return
        with self._shared[decay].whole():
            yield self.models[decay]

    def load(self, decay: Pace, state: Mapping[str, Any]) -> None:
        """Replace an average by a whole state dict."""
        if not self._shared:
            self.models[decay].load_state_dict(state)
            return
        with self._shared[decay].replaced():
            self.models[decay].load_state_dict(state)

    def tensors(self, decay: Pace) -> list[Tensor]:
        """Return the averaged tensors on this process."""
        return self._shared[decay].own if self._shared else list(self.models[decay].parameters())

    def due(self, step: int) -> bool:
        """Return whether optimizer step `step` (from 1) ends a period, and there is an average to update."""
        return bool(self.models) and step % self.period == 0

    def get_ready(self, device: torch.device) -> None:
        """Put the inputs of `follow` on the device: a step under capture can neither copy nor load a kernel."""
        if device not in self._decays:
            rows = [(0.0, p.exponent + 1) if isinstance(p, Power) else (p, 0.0) for p in self.models]
            self._decays[device] = torch.tensor(list(zip(*rows, strict=True)) or [[], []], dtype=torch.float64).to(
                device
            )
            if device.type == "cuda":
                self._fused()(torch.zeros_like(self._decays[device][0]))  # goes nowhere

    def moved(self, step: Tensor) -> Tensor:
        """Return how far each average moves towards the weights at a step: (averages,), in fp64."""
        self.get_ready(step.device)
        decays, exponents = self._decays[step.device]
        if self.warmup:
            decays = decays.minimum(step.double() / (9 + step.double()))
        kept = decays**self.period
        if any(isinstance(pace, Power) for pace in self.models):
            since = (step.double() - self.period).clamp(min=0) / step.double()
            kept = torch.where(exponents > 0, since**exponents, kept)
        return 1 - kept

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages, if optimizer step `step` (from 1) ends a period."""
        if self.due(step):
            self.follow(torch.tensor(step))

    @torch.no_grad()
    def follow(self, step: Tensor) -> None:
        """Update the averages at a step that ends a period; without waiting for the device if `step` lies on it.

        Raises:
            ConfigError: if the network's weights are no longer those that were there at the beginning.

        """
        self._require_the_same_weights()
        moved = self.moved(step)
        if step.is_cuda:
            self._fused()(moved)
        else:
            weights = [weight.to(_followed_in(weight.dtype)) for weight in self._weights]
            for share, decay in zip(moved.tolist(), self.models, strict=True):
                torch._foreach_lerp_(self.tensors(decay), weights, share)
        for model in self.models.values():
            # Looked up each time: a forward pass may put another tensor in a buffer's place.
            for average, buffer in zip(model.buffers(), self._model.buffers(), strict=True):
                average.copy_(buffer)

    def _require_the_same_weights(self) -> None:
        """Check that the model still has its first weights, since `model.to(...)` replaces them."""
        if self._shared:
            return
        kept, now = self._weights, list(self._model.parameters())
        if len(kept) != len(now) or any(a.data_ptr() != b.data_ptr() for a, b in zip(kept, now, strict=True)):
            raise ConfigError(
                "averages of weights that are no longer the network's, expected the same ones at every step; make "
                "Averages(model, ...) after model.to(...), and whatever else gives it other parameters"
            )

    def _fused(self) -> Any:
        if self._kernel is None:
            from fullstride.step.torch.ema.lerp_kernel import LerpTable  # Triton is a GPU's

            self._kernel = LerpTable(self._weights, [self.tensors(decay) for decay in self.models])
        return self._kernel
