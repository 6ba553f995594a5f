"""Gradients as means over processes, sent in a few buckets while the backward pass goes on.

Parameters carry no tangent, so a derivative inside the loss never meets a collective: what is sent are gradients that
the backward pass has accumulated, or results of a compiled one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor, nn

from fullstride.step.torch.distributed.buckets import Bucket, filled
from fullstride.step.torch.distributed.early_gradients import listening
from fullstride.step.torch.distributed.processes import Processes
from fullstride.step.torch.distributed.shards import Shard, Shards
from fullstride.step.torch.metrics import stacked, unstacked

T = TypeVar("T")


class Reducer:
    """Averages the gradients of a model and the metrics of a step over processes.

    Which parameters have gradients is what the first step shows; they must be the same on every process, and stay.
    With shards all must have one, and each process is left with its part of them.
    """

    def __init__(self, model: nn.Module, processes: Processes, shards: Shards | None = None):
        """Watch the gradients of a model, of which every process has a copy."""
        self._processes = processes
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._buckets: Sequence[Bucket | Shard] = []
        self._bucket_of: dict[nn.Parameter, Bucket | Shard] = {}
        self._watching, self._sent = False, 0
        self._given: dict[nn.Parameter, Tensor] = {}  # in the present backward pass, until they are sent
        self._early: dict[nn.Parameter, int] = {}  # where those lie that a compiled pass has handed over
        self._first, self._told = False, dict[int, int]()
        self._numbered: dict[int, nn.Parameter] = {}  # results of a compiled backward pass
        if shards is not None:
            self._take(shards.shards)
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in self._names]

    @property
    def buckets(self) -> int:
        """How many transfers a step makes; 0 before the first one has shown."""
        return len(self._buckets)

    @property
    def early(self) -> int:
        """How many results of a compiled backward pass are sent while it goes on."""
        return len(self._numbered)

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """The backward pass that completes a step's gradients; they are the means over the processes afterwards.

        Raises:
            ValueError: if processes or steps differ in which parameters have gradients.
            PeerError: if another process has ended.

        """
        if not self._hooks:
            raise RuntimeError("this step has ended, as its processes have parted; make a new one to go on")
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        self._watching, self._sent = bool(self._buckets), 0
        # What earlier micro-batches have left is part of a gradient that a compiled pass does not know.
        self._first = all(p.grad is None for p in self._names)
        try:
            with listening(self._heard):
                yield
            if not self._buckets:
                self._make_buckets()
            self._finish()
        finally:
            self._watching = False
            for found in (self._given, self._early, self._told):
                found.clear()

    def end(self) -> None:
        """Watch the model no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def metrics(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over the processes, of metrics that are the same on each by name."""
        values = stacked(own)
        self._processes.start_average(values)()
        return unstacked(values, {name: value.dtype for name, value in own.items()})

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank; collective."""
        return self._processes.gather(value)

    def means(self, own: Callable[[Tensor], Tensor | None]) -> dict[nn.Parameter, Tensor]:
        """Means over the processes, of gradients made without this, by what they belong to; collective."""
        found = {p: gradient.contiguous() for p in self._names if (gradient := own(p)) is not None}
        self._check_same(list(found))
        for gradient in found.values():
            self._processes.start_average(gradient)()
        if not (shards := [bucket for bucket in self._buckets if isinstance(bucket, Shard)]):
            return found
        whole = [shard for shard in shards if found.keys() >= set(shard.parameters)]  # a step says what is missing
        return {shard.own: shard.part_of([found[p] for p in shard.parameters]) for shard in whole}

    def _check_same(self, given: list[nn.Parameter]) -> None:
        found = self._processes.gather([self._names[p] for p in given])
        for rank, names in enumerate(found):
            if differing := sorted(set(names) ^ set(found[0])):
                raise ValueError(
                    f"{', '.join(differing[:3])}: a gradient on one of the processes 0 and {rank} alone; "
                    "expected the same parameters on each: let no loss leave out a part of the model by its data"
                )

    def _take(self, buckets: Sequence[Bucket | Shard]) -> None:
        self._buckets = buckets
        for bucket in buckets:
            self._bucket_of |= dict.fromkeys(bucket.parameters, bucket)

    def _make_buckets(self) -> None:
        """In the order in which a backward pass arrives at parameters, or nearly so: from the last to the first."""
        given = [p for p in reversed(self._names) if p.grad is not None]
        self._check_same(given)
        self._take([Bucket(parameters, self._processes) for parameters in filled(given)])
        self._given = {p: p.grad for p in given if p.grad is not None}
        for bucket in self._buckets:
            bucket.missing = 0

    def _heard(self, number: int, gradient: Tensor) -> None:
        """A compiled backward pass has a result, of which the first time nobody knows whose gradient it is."""
        if not (self._watching and self._first):
            return
        if (parameter := self._numbered.get(number)) is not None:
            self._early[parameter] = gradient.data_ptr()
            self._give(parameter, gradient)
        else:
            self._told[gradient.data_ptr()] = number

    def _arrived(self, parameter: Tensor) -> None:
        if not self._watching:
            return
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if parameter in self._early:
            self._arrived_again(parameter, parameter.grad)
            return
        if (number := self._told.get(parameter.grad.data_ptr())) is not None:
            self._numbered[number] = parameter
        self._give(parameter, parameter.grad)

    def _arrived_again(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """What was handed over early; autograd copies it where it still waits to be sent."""
        if parameter not in self._given and self._early[parameter] != gradient.data_ptr():
            raise RuntimeError(
                f"{self._names[parameter]}: the compiled backward pass has handed over another gradient than it "
                "returned; use backend=eager or graph, which send what has arrived"
            )
        if isinstance(self._bucket_of[parameter], Shard):
            parameter.grad = None  # as one that is sent when it arrives

    def _give(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if parameter not in self._bucket_of:
            raise ValueError(
                f"{self._names[parameter]} has a gradient and had none in the first step; expected the same parameters "
                "in each step: let the first step use the whole model"
            )
        self._given[parameter] = gradient
        self._bucket_of[parameter].missing -= 1
        self._send_complete()

    def _send_complete(self) -> None:
        """Every process sends its buckets in the same order, whatever the order in which they are complete."""
        while self._sent < len(self._buckets) and not (bucket := self._buckets[self._sent]).missing:
            # Autograd would copy a gradient to which somebody holds on.
            bucket.send([self._given.pop(p) for p in bucket.parameters], self._processes)
            self._sent += 1

    def _finish(self) -> None:
        self._send_complete()
        if self._sent < len(self._buckets):
            late = [self._names[p] for p in self._buckets[self._sent].parameters if p not in self._given]
            raise ValueError(
                f"{', '.join(late[:3])} has no gradient in this step; expected the same parameters in each step, and "
                "with distributed=fsdp all of them: let every step use the whole model"
            )
        for bucket in self._buckets:
            bucket.receive()
