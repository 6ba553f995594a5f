"""Prefetch of batches to the device: the next one is copied during the step of the current one."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def prefetch(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on a device, in order; on CUDA one ahead, by a stream of its own.

    Args:
        batches: tensors or pytrees of them, on the host; pinned ones are copied without a detour.
        device: device to copy them to.

    """
    if device.type != "cuda":
        yield from (pytree.tree_map_only(Tensor, lambda x: x.to(device), batch) for batch in batches)
        return
    side = torch.cuda.Stream(device)
    sent = (_send(batch, side) for batch in batches)
    first = next(sent, None)
    while first is not None:
        second = next(sent, None)
        batch, copied = first
        stream = torch.cuda.current_stream(device)
        # Its own copy, not the side stream, on which the next copy lies already.
        stream.wait_event(copied)
        for x in pytree.tree_leaves(batch):
            if isinstance(x, Tensor):
                # Its memory is the side stream's, which must not reuse it while this stream reads.
                x.record_stream(stream)
        yield batch
        first = second


def _send(batch: Any, side: torch.cuda.Stream) -> tuple[Any, torch.cuda.Event]:
    copied = torch.cuda.Event()
    with torch.cuda.stream(side):
        pinned = pytree.tree_map_only(Tensor, lambda x: x if x.is_pinned() else x.pin_memory(), batch)
        there = pytree.tree_map_only(Tensor, lambda x: x.to(side.device, non_blocking=True), pinned)
        copied.record()
    return there, copied
