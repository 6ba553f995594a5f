"""Report of what a step runs, how near it is to eager fp32, and what it costs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullstride.errors import shortened
from fullstride.step.torch.body import Body
from fullstride.step.torch.optimizers import layers

LONGEST = 200  # characters of a cause


@dataclass(frozen=True)
class Compilation:
    """One compilation of the loss.

    Attributes:
        seconds: that it took.
        cause: what differed from the compilations before, "" for the first one.

    """

    seconds: float
    cause: str


@dataclass(frozen=True)
class Explanation:
    """Report of what a step runs and what it costs, as far as its first steps have shown.

    Attributes:
        backend: name of the backend of the next step.
        why: that it was named, or `auto`'s times and refusals.
        errors: relative error of the gradients in each form that was compared with eager fp32.
        allowed: largest relative error of all gradients together that the precision explains.
        compilations: compilations of the loss, the first one first.
        host_ms: median time until a step's call returned, ms; None before it was taken.
        device_ms: median time of a step on the GPU's stream, waits for the host included, ms; None without one.
        bytes: bytes of the weights and buffers, the optimizer's state, the averages, and on a GPU the most that the
            process has had allocated.
        notes: lines that the step has logged.

    """

    backend: str
    why: str
    errors: Mapping[str, float]
    allowed: float
    compilations: tuple[Compilation, ...]
    host_ms: float | None
    device_ms: float | None
    bytes: Mapping[str, int]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Return a line for each of them."""
        near = [f"{form}: relative error {error:.2e} of {self.allowed:.2g}" for form, error in self.errors.items()]
        made = [f"{each.seconds:.1f} s{', as ' * bool(each.cause)}{each.cause}" for each in self.compilations]
        times = {"host": self.host_ms, "device": self.device_ms}
        lines = {
            "backend": [f"{self.backend} ({self.why})"],
            "compared": near or ["with nothing"],
            "compiled": made or ["nothing"],
            "a step": [f"{name} {ms:.3f} ms" for name, ms in times.items() if ms is not None] or ["not timed yet"],
            "memory": [f"{name} {size / 1e6:,.1f} MB" for name, size in self.bytes.items() if size],
            "notes": self.notes,
        }
        return "\n".join(f"{name}: {'; '.join(said)}" for name, said in lines.items() if said)


def compilations(name: str) -> tuple[Compilation, ...]:
    """Return the compilations of a function whose code has that name."""
    from torch._dynamo.utils import get_compilation_metrics  # a long import

    found = [each for each in get_compilation_metrics() if each.co_name == name]
    return tuple(Compilation(each.entire_frame_compile_time_s or 0.0, _cause(each.recompile_reason)) for each in found)


def _cause(reason: str | None) -> str:
    first = (reason or "").partition("\n")[0].partition("  #")[0]
    return shortened(first.partition(": ")[2] or first, LONGEST)


def bytes_of(body: Body) -> dict[str, int]:
    """Return the bytes of what a step keeps on this process."""
    states = [own for each in layers(body.optimizer) for own in each.state.values()]
    found: dict[str, Iterable[Any]] = {
        "weights": [*body.model.parameters(), *body.model.buffers()],
        "optimizer": [value for own in states for value in own.values()],
        "averages": [x for decay in body.ema.models for x in body.ema.tensors(decay)],
    }
    sizes = {
        name: sum({id(x): x.nbytes for x in given if isinstance(x, Tensor)}.values()) for name, given in found.items()
    }
    if body.device.type == "cuda":
        sizes["most allocated"] = torch.cuda.max_memory_allocated(body.device)
    return sizes
