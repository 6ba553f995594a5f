"""Gradients as means over processes, sent in a few buckets while the backward pass goes on.

Parameters carry no tangent, so a derivative inside the loss never meets a collective: what is sent are gradients that
the backward pass has accumulated, or results of a compiled one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from fullstride.step.torch.clipping import refuse_sparse
from fullstride.step.torch.distributed.buckets import Bucket, filled
from fullstride.step.torch.distributed.early_gradients import listening
from fullstride.step.torch.distributed.processes import Processes
from fullstride.step.torch.distributed.shards import Shard, Shards


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
        """Receive a result of a compiled pass; the first time its parameter is not known yet."""
        if not self._hears:
            return
        if (parameter := self._parameter_of.get(number)) is None:
            self._unknown[gradient.data_ptr()] = number
            return
        self._early[parameter] = gradient.data_ptr()
        self.give(parameter, gradient)

    def arrive(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Receive the gradient of a parameter."""
        if parameter in self._early:
            # Autograd copies those that still wait to be sent.
            if parameter not in self._waiting and self._early[parameter] != gradient.data_ptr():
                raise RuntimeError(
                    f"{self._names[parameter]}: the compiled backward pass has handed over another gradient than it "
                    "returned; use backend=eager or graph, which send what has arrived"
                )
            if isinstance(self._bucket_of[parameter], Shard):
                parameter.grad = None  # as one that is sent when it arrives
            return
        if (number := self._unknown.get(gradient.data_ptr())) is not None:
            self._parameter_of[number] = parameter
        self.give(parameter, gradient)

    def give(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Send a gradient with its bucket.

        Raises:
            ValueError: for a parameter that had no gradient in the first step.

        """
        if parameter not in self._bucket_of:
            raise ValueError(
                f"{self._names[parameter]} has a gradient and had none in the first step; expected the same parameters "
                "in each step: let the first step use the whole model"
            )
        self._waiting[parameter] = gradient
        self._missing[self._bucket_of[parameter]] -= 1
        # Every process sends its buckets in the same order, whatever the order in which they are complete.
        while self._sent < len(self._buckets) and not self._missing[bucket := self._buckets[self._sent]]:
            # Autograd would copy a gradient to which somebody holds on.
            bucket.send([self._waiting.pop(p) for p in bucket.parameters], self._processes)
            self._sent += 1

    def finish(self) -> None:
        """Wait for the means and write them in place of the gradients.

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


class Reducer:
    """Averages the gradients of a model and the metrics of a step over processes.

    Which parameters have gradients is what the first step shows; they must be the same on every process, and stay.
    With shards all must have one, and each process is left with its part of them.
    """

    def __init__(self, model: nn.Module, processes: Processes, shards: Shards | None = None):
        """Watch the gradients of a model, of which every process has a copy."""
        self.processes = processes
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._buckets: Sequence[Bucket | Shard] = [] if shards is None else shards.shards
        self._parameter_of: dict[int, nn.Parameter] = {}  # results of a compiled backward pass
        self._pass: BackwardPass | None = None
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in self._names]

    @property
    def buckets(self) -> int:
        """Number of transfers per step; 0 before the first step."""
        return len(self._buckets)

    @property
    def early(self) -> int:
        """Number of results of a compiled backward pass that are sent while it runs."""
        return len(self._parameter_of)

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """The backward pass that completes a step's gradients; they are the means over the processes afterwards.

        Raises:
            ValueError: if processes or steps differ in which parameters have gradients.
            PeerError: if another process has ended.

        """
        if not self._hooks:
            raise RuntimeError("this step has ended, as its processes have separated; build a new one to continue")
        self._pass = self._begun() if self._buckets else None
        try:
            with listening(self._heard):
                yield
            (self._pass or self._first()).finish()
        finally:
            self._pass = None

    def _begun(self) -> BackwardPass:
        return BackwardPass(self._buckets, self._names, self._parameter_of, self.processes)

    def _first(self) -> BackwardPass:
        """The first pass, after which its gradients are put in buckets and sent.

        Buckets are in the order in which a backward pass arrives at parameters, or nearly so: from the last to the
        first.
        """
        given = [p for p in reversed(self._names) if p.grad is not None]
        refuse_sparse({self._names[p]: p for p in given})
        self._check_same(given)
        self._buckets = [Bucket(parameters, self.processes) for parameters in filled(given)]
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
        """Stop watching the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def means(self, own: Callable[[Tensor], Tensor | None]) -> dict[nn.Parameter, Tensor]:
        """Means over the processes, of gradients made without this, by what they belong to; collective."""
        found = {p: gradient.to_dense().contiguous() for p in self._names if (gradient := own(p)) is not None}
        self._check_same(list(found))
        for gradient in found.values():
            self.processes.transfer.start_average(gradient)()
        if not (shards := [bucket for bucket in self._buckets if isinstance(bucket, Shard)]):
            return found
        whole = [shard for shard in shards if found.keys() >= set(shard.parameters)]  # a step says what is missing
        return {shard.own: shard.part_of([found[p] for p in shard.parameters]) for shard in whole}

    def _check_same(self, given: list[nn.Parameter]) -> None:
        found = self.processes.gather([self._names[p] for p in given])
        for rank, names in enumerate(found):
            if differing := sorted(set(names) ^ set(found[0])):
                raise ValueError(
                    f"{', '.join(differing[:3])}: a gradient on one of the processes 0 and {rank} alone; "
                    "expected the same parameters on each: let no loss leave out a part of the model by its data"
                )
