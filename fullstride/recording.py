"""A CUDA graph, and what recording one asks of the process."""

from collections.abc import Callable
from typing import Any

import torch

from fullstride.collector import nothing_collected


class CudaGraph:
    """A function recorded once and replayed."""

    def __init__(self, function: Callable[[], Any], generator: torch.Generator | None):
        """Record a function that ran before on this stream; nothing of it is executed.

        Raises:
            RuntimeError: if it does what cannot be captured, as waiting for the device.

        """
        self._graph = torch.cuda.CUDAGraph()
        if generator is not None and generator.device.type == "cuda":
            self._graph.register_generator_state(generator)
        # What other threads do, as one that pins a loader's batches, is none of the record.
        record = torch.cuda.graph(self._graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local")
        try:
            # A dead CUDA graph that the garbage collector finds breaks the one that is recorded (pytorch#161037).
            with nothing_collected(), record:
                self.result = function()
        except BaseException:
            _release(generator)
            raise

    def replay(self) -> Any:
        """Run it; the result lies where it lay."""
        self._graph.replay()
        return self.result


def _release(generator: torch.Generator | None) -> None:
    """After a record that failed, generators would refuse to draw: they still take themselves for recorded."""
    own = [] if generator is None or generator.device.type != "cuda" else [generator]
    for each in [torch.cuda.default_generators[torch.cuda.current_device()], *own]:
        each.graphsafe_set_state(each.clone_state())
