"""An average of the weights in parts, of which each process keeps one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fullstride.step.torch.distributed.shards import Shard


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
