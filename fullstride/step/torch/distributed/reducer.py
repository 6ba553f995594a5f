"""Gradients as means over processes, sent in a few buckets while the backward pass goes on.

Parameters carry no tangent, so a derivative inside the loss never meets a collective: what is sent are gradients that
the backward pass has accumulated, or results of a compiled one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor, nn

from fullstride.step.torch.distributed.backward_pass import BackwardPass
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
        self._buckets: Sequence[Bucket | Shard] = [] if shards is None else shards.shards
        self._parameter_of: dict[int, nn.Parameter] = {}  # results of a compiled backward pass
        self._pass: BackwardPass | None = None
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in self._names]

    @property
    def buckets(self) -> int:
        """How many transfers a step makes; 0 before the first one has shown."""
        return len(self._buckets)

    @property
    def early(self) -> int:
        """How many results of a compiled backward pass are sent while it goes on."""
        return len(self._parameter_of)

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """The backward pass that completes a step's gradients; they are the means over the processes afterwards.

        Raises:
            ValueError: if processes or steps differ in which parameters have gradients.
            PeerError: if another process has ended.

        """
        if not self._hooks:
            raise RuntimeError("this step has ended, as its processes have parted; make a new one to go on")
        self._pass = self._begun() if self._buckets else None
        try:
            with listening(self._heard):
                yield
            (self._pass or self._first()).finish()
        finally:
            self._pass = None

    def _begun(self) -> BackwardPass:
        return BackwardPass(self._buckets, self._names, self._parameter_of, self._processes)

    def _first(self) -> BackwardPass:
        """The first pass, after which its gradients are put in buckets and sent.

        Buckets are in the order in which a backward pass arrives at parameters, or nearly so: from the last to the
        first.
        """
        given = [p for p in reversed(self._names) if p.grad is not None]
        self._check_same(given)
        self._buckets = [Bucket(parameters, self._processes) for parameters in filled(given)]
        first = self._begun()
        for parameter in given:
            assert parameter.grad is not None
            first.give(parameter, parameter.grad)
        return first

    def _heard(self, number: int, gradient: Tensor) -> None:
        if self._pass is not None:
            self._pass.hear(number, gradient)

    def _arrived(self, parameter: Tensor) -> None:
        if self._pass is not None:
            assert isinstance(parameter, nn.Parameter)
            assert parameter.grad is not None
            self._pass.arrive(parameter, parameter.grad)

    def end(self) -> None:
        """Watch the model no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def metrics(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over the processes, of metrics that are the same on each by name."""
        values = stacked(own)
        self._processes.transfer.start_average(values)()
        return unstacked(values, {name: value.dtype for name, value in own.items()})

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank; collective."""
        return self._processes.gather(value)

    def means(self, own: Callable[[Tensor], Tensor | None]) -> dict[nn.Parameter, Tensor]:
        """Means over the processes, of gradients made without this, by what they belong to; collective."""
        found = {p: gradient.contiguous() for p in self._names if (gradient := own(p)) is not None}
        self._check_same(list(found))
        for gradient in found.values():
            self._processes.transfer.start_average(gradient)()
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
