"""Gradients handed over while a compiled backward pass goes on.

To autograd such a pass is one node: parameters get their gradients when all of it is done, too late to overlap
a transfer. So the compiler announces each result right after the kernel that makes it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Hear = Callable[[int, Tensor], None]
_LISTENERS: list[Hear] = []


# It changes nothing: as an operation without results it would be left out.
@torch.library.custom_op("fullstride::ready", mutates_args=("gradient",))
def ready(gradient: Tensor, number: int) -> None:
    """Announce a result of a backward pass."""
    for hear in _LISTENERS:
        hear(number, gradient)


@contextmanager
def listening(hear: Hear) -> Iterator[None]:
    """Report each result as (its index among the results of the backward pass, the tensor)."""
    _LISTENERS.append(hear)
    try:
        yield
    finally:
        _LISTENERS.remove(hear)
