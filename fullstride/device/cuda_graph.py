"""A CUDA graph, and its capture."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fullstride.device.tensor_trees import flattened, mapped
from fullstride.process.gc_paused import gc_paused


class CudaGraph:
    """A function captured once and replayed."""

    def __init__(self, function: Callable[[], Any], generator: torch.Generator | None):
        """Capture a function that ran before on this stream; nothing of it is executed.

        Raises:
            RuntimeError: if it does something that cannot be captured, such as waiting for the device.

        """
        self._graph = torch.cuda.CUDAGraph()
        if generator is not None and generator.device.type == "cuda":
            self._graph.register_generator_state(generator)
        # The work of other threads, such as one that pins a loader's batches, is not captured.
        record = torch.cuda.graph(self._graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local")
        try:
            # If the garbage collector frees an old CUDA graph meanwhile, the capture fails (pytorch#161037).
            with gc_paused(), record:
                self.result = function()
        except BaseException:
            _release(generator)
            raise

    def replay(self) -> Any:
        """Replay the graph; the result is in the memory of the capture."""
        self._graph.replay()
        return self.result


def without_gaps(batch: Any) -> Any:
    """Copy views with gaps: a captured graph reads clones, whose strides compilers tell from a view's."""

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.stride() == torch.empty_like(x, device="meta").stride():
            return x
        return x.clone()

    return mapped(copied, batch)


def static_input(batch: Any) -> Any:
    """Return the inputs of a captured graph: copies of a batch's tensors, which `copy_into` overwrites."""
    return mapped(lambda x: x.clone() if isinstance(x, Tensor) else x, batch)


def copy_into(place: Any, batch: Any) -> None:
    """Copy a batch of the same shapes into the inputs of a captured graph."""
    for kept, new in zip(flattened(place)[0], flattened(batch)[0], strict=True):
        if isinstance(new, Tensor):
            kept.copy_(new, non_blocking=True)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """A side stream as the current one, in order with the one around it; without one nothing changes."""
    if stream is None:
        yield
        return
    around = torch.cuda.current_stream(stream.device)
    stream.wait_stream(around)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        around.wait_stream(stream)


def _release(generator: torch.Generator | None) -> None:
    """Unregister generators after a failed capture: they would refuse to draw, as if still captured."""
    own = [] if generator is None or generator.device.type != "cuda" else [generator]
    for each in [torch.cuda.default_generators[torch.cuda.current_device()], *own]:
        each.graphsafe_set_state(each.clone_state())
