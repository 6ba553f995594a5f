"""Tensors on the host one after another, each while the device works on the next."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def to_host(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors on the host, in order; from CUDA each is copied behind what made it, and waited for one later.

    So the host has launched the next one's work before it waits for this one. No more than two are pinned at a time.

    Args:
        tensors: made as they are asked for, on any device.

    """
    waiting: tuple[Tensor, torch.cuda.Event | None] | None = None
    for x in tensors:
        sent = _sent(x)
        if waiting is not None:
            yield _arrived(*waiting)
        waiting = sent
    if waiting is not None:
        yield _arrived(*waiting)


def _sent(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if not x.is_cuda:
        return x.cpu(), None
    host = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(x.device))  # which need not be the current device's
    return host, copied


def _arrived(host: Tensor, copied: torch.cuda.Event | None) -> Tensor:
    if copied is None:
        return host
    copied.synchronize()
    return host.clone()  # pageable: pinned memory of many batches would be taken from the whole machine
