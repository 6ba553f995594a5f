"""One backward pass whose gradients are sent while it goes on."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fullstride.step.torch.distributed.buckets import Bucket
from fullstride.step.torch.distributed.processes import Processes
from fullstride.step.torch.distributed.shards import Shard


class BackwardPass:
    """The backward pass that completes a step's gradients: each bucket is sent as soon as all of it is there.

    A compiled pass hands results over early, by their numbers. Whose gradient a number is shows when the parameter gets
    it: `parameter_of` has what earlier passes have shown, and is added to.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket | Shard],
        names: Mapping[nn.Parameter, str],
        parameter_of: dict[int, nn.Parameter],
        processes: Processes,
    ):
        """Wait for the gradients of these buckets."""
        self._buckets = buckets
        self._names = names
        self._parameter_of = parameter_of
        self._processes = processes
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        self._missing = {bucket: len(bucket.parameters) for bucket in buckets}
        self._sent = 0
        self._waiting: dict[nn.Parameter, Tensor] = {}  # until they are sent
        self._early: dict[nn.Parameter, int] = {}  # where those lie that were handed over early
        self._unknown: dict[int, int] = {}  # numbers of results by where they lie
        # What earlier micro-batches have left is part of a gradient that a compiled pass does not know.
        self._hears = all(p.grad is None for p in names)

    def hear(self, number: int, gradient: Tensor) -> None:
        """A compiled pass has a result, of which the first time nobody knows whose gradient it is."""
        if not self._hears:
            return
        if (parameter := self._parameter_of.get(number)) is None:
            self._unknown[gradient.data_ptr()] = number
            return
        self._early[parameter] = gradient.data_ptr()
        self.give(parameter, gradient)

    def arrive(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A parameter has its gradient."""
        if parameter in self._early:
            self._arrive_again(parameter, gradient)
            return
        if (number := self._unknown.get(gradient.data_ptr())) is not None:
            self._parameter_of[number] = parameter
        self.give(parameter, gradient)

    def _arrive_again(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Gradients that were handed over early; autograd copies those that still wait to be sent."""
        if parameter not in self._waiting and self._early[parameter] != gradient.data_ptr():
            raise RuntimeError(
                f"{self._names[parameter]}: the compiled backward pass has handed over another gradient than it "
                "returned; use backend=eager or graph, which send what has arrived"
            )
        if isinstance(self._bucket_of[parameter], Shard):
            parameter.grad = None  # as one that is sent when it arrives

    def give(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Send a gradient with its bucket.

        Raises:
            ValueError: for a parameter that had none in the first step.

        """
        if parameter not in self._bucket_of:
            raise ValueError(
                f"{self._names[parameter]} has a gradient and had none in the first step; expected the same parameters "
                "in each step: let the first step use the whole model"
            )
        self._waiting[parameter] = gradient
        self._missing[self._bucket_of[parameter]] -= 1
        self._send_complete()

    def _send_complete(self) -> None:
        """Every process sends its buckets in the same order, whatever the order in which they are complete."""
        while self._sent < len(self._buckets) and not self._missing[bucket := self._buckets[self._sent]]:
            # Autograd would copy a gradient to which somebody holds on.
            bucket.send([self._waiting.pop(p) for p in bucket.parameters], self._processes)
            self._sent += 1

    def finish(self) -> None:
        """Wait for the means and put them in the gradients' place.

        Raises:
            ValueError: if a gradient has not come.

        """
        if self._sent < len(self._buckets):
            late = [self._names[p] for p in self._buckets[self._sent].parameters if p not in self._waiting]
            raise ValueError(
                f"{', '.join(late[:3])} has no gradient in this step; expected the same parameters in each step, and "
                "with distributed=fsdp all of them: let every step use the whole model"
            )
        for bucket in self._buckets:
            bucket.receive()
