"""Gradients as means over processes, sent in a few buckets while the backward pass goes on.

Parameters carry no tangent, so a derivative inside the loss never meets a collective: what is sent are gradients that
the backward pass has accumulated.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fullstride.step.torch.processes import Processes

# Large enough for its time to be the transfer's, small enough for the last one not to be long.
BUCKET_BYTES = 25 * 2**20


class Bucket:
    """Parameters whose gradients travel together, in one buffer that stays where it is."""

    def __init__(self, parameters: list[nn.Parameter]):
        """Make the buffer."""
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.buffer = parameters[0].new_empty(sum(sizes))
        self._parts = [flat.view(p.shape) for flat, p in zip(self.buffer.split(sizes), parameters, strict=True)]
        self._wait: Callable[[], None] | None = None
        self.missing = len(parameters)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    @torch.no_grad()
    def send(self, processes: Processes) -> None:
        """Begin to average the gradients."""
        torch._foreach_copy_(self._parts, self._gradients())
        self._wait = processes.start_average(self.buffer)

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the means and put them in the gradients' place."""
        assert self._wait is not None
        self._wait()
        torch._foreach_copy_(self._gradients(), self._parts)


class Reducer:
    """Averages the gradients of a model and the metrics of a step over processes.

    Which parameters have gradients is what the first step shows; they must be the same on every process, and stay.
    """

    def __init__(self, model: nn.Module, processes: Processes):
        """Watch the gradients of a model, of which every process has a copy."""
        self._processes = processes
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._watching, self._sent = False, 0
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """The backward pass that completes a step's gradients; they are the means over the processes afterwards.

        Raises:
            ValueError: if processes or steps differ in which parameters have gradients.
            PeerError: if another process has ended.

        """
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        self._watching, self._sent = bool(self._buckets), 0
        try:
            yield
        finally:
            self._watching = False
        if not self._buckets:
            self._make_buckets()
        self._finish()

    def metrics(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over the processes, of metrics that are the same on each by name."""
        values = torch.stack([value.float() for value in own.values()])
        self._processes.start_average(values)()
        return dict(zip(own, values.unbind(), strict=True))

    def _make_buckets(self) -> None:
        """In the order in which a backward pass arrives at parameters, or nearly so: from the last to the first."""
        given = [p for p in reversed(self._names) if p.grad is not None]
        found = self._processes.gather([self._names[p] for p in given])
        for rank, names in enumerate(found):
            if differing := sorted(set(names) ^ set(found[0])):
                raise ValueError(
                    f"{', '.join(differing[:3])}: a gradient on one of the processes 0 and {rank} alone; "
                    "expected the same parameters on each: let no loss leave out a part of the model by its data"
                )
        for _, alike in itertools.groupby(given, key=lambda p: p.dtype):
            self._fill(list(alike))
        for bucket in self._buckets:
            self._bucket_of |= dict.fromkeys(bucket.parameters, bucket)
            bucket.missing = 0

    def _fill(self, parameters: list[nn.Parameter]) -> None:
        waiting, size = [], 0
        for parameter in parameters:
            waiting.append(parameter)
            size += parameter.nbytes
            if size >= BUCKET_BYTES or parameter is parameters[-1]:
                self._buckets.append(Bucket(waiting))
                waiting, size = [], 0

    def _arrived(self, parameter: Tensor) -> None:
        if not self._watching:
            return
        assert isinstance(parameter, nn.Parameter)
        if parameter not in self._bucket_of:
            raise ValueError(
                f"{self._names[parameter]} has a gradient and had none in the first step; expected the same parameters "
                "in each step: let the first step use the whole model"
            )
        self._bucket_of[parameter].missing -= 1
        self._send_complete()

    def _send_complete(self) -> None:
        """Every process sends its buckets in the same order, whatever the order in which they are complete."""
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._buckets[self._sent].send(self._processes)
            self._sent += 1

    def _finish(self) -> None:
        self._send_complete()
        if self._sent < len(self._buckets):
            late = [self._names[p] for p in self._buckets[self._sent].parameters if p.grad is None]
            raise ValueError(
                f"{', '.join(late[:3])} had a gradient in the first step and has none now; expected the same "
                "parameters in each step: let every step use the whole model"
            )
        for bucket in self._buckets:
            bucket.receive()
