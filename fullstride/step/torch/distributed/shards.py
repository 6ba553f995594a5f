"""Weights, optimizer state and averages in parts, of which each process keeps and updates one (arXiv:1910.02054).

The network's weights stay whole on every process, as views of flat buffers. Its gradients are sent as each process's
part of their means; each updates its part of the weights, and all parts are gathered again behind the optimizer. So no
collective lies in a forward pass, nor in its derivative: that of a MeanFlow loss runs as it does in one process.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.step.torch.distributed.buckets import BucketLayout, filled
from fullstride.step.torch.distributed.processes import Processes
from fullstride.step.torch.ema.averages import Averages, SharedAverage

# Whose step treats every element by itself: a part of a tensor is updated as the tensor would be.
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
STEP = "step"  # of their state, the only entry that is not of the parameter's shape
Tensors = dict[str, Tensor]


class Shard:
    """A bucket's weights in one buffer, and this process's part of it.

    Attributes:
        parameters: the network's, which are views of the buffer.
        whole: the buffer; `memory` if other processes write into it.
        own: this process's part, what the optimizer updates; its gradient is this part of the mean gradient.

    """

    def __init__(self, parameters: list[nn.Parameter], processes: Processes):
        self.parameters = parameters
        self._processes = processes
        self.layout = BucketLayout(parameters, processes.size)
        first = parameters[0].detach()
        self.memory = processes.transfer.shared(first, self.layout.size)
        self.whole = first.new_zeros(self.layout.size) if self.memory is None else self.memory.own
        for parameter, view in zip(parameters, self.layout.views(self.whole), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.own = nn.Parameter(self.part(self.whole))
        self._wait: Callable[[], None] | None = None
        self._sent: tuple[Tensor, Tensor] | None = None

    def part(self, flat: Tensor) -> Tensor:
        """The process's part of a buffer."""
        return flat.chunk(self._processes.size)[self._processes.rank]

    @torch.no_grad()
    def send(self, gradients: Sequence[Tensor], processes: Processes) -> None:
        """Begin to average the gradients and to give each process its part; the parameters let go of theirs."""
        flat = self.whole.new_empty(self.layout.size)
        torch._foreach_copy_(self.layout.views(flat), list(gradients))
        if gaps := self.layout.gaps(flat):
            torch._foreach_zero_(gaps)  # or the norm would count what lay there
        for parameter in self.parameters:
            parameter.grad = None
        mean = torch.empty_like(self.own, requires_grad=False)
        self._wait, self._sent = processes.transfer.start_shares(flat, mean), (flat, mean)

    def receive(self) -> None:
        """Wait for this process's part."""
        assert self._wait is not None
        assert self._sent is not None
        self._wait()
        self.own.grad = self._sent[1]
        self._wait = self._sent = None

    def views(self, dtype: torch.dtype) -> list[Tensor]:
        """Tensors of the parameters' shapes in a new buffer of that format."""
        return self.layout.views(self.whole.new_empty(self.layout.size, dtype=dtype))

    @torch.no_grad()
    def part_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The process's part of tensors of the parameters' shapes, on the weights' device; a copy."""
        flat = self.whole.new_zeros(self.layout.size, dtype=tensors[0].dtype)
        for view, tensor in zip(self.layout.views(flat), tensors, strict=True):
            view.copy_(tensor)
        return self.part(flat).clone()

    def gathered(self, own: Tensor) -> list[Tensor]:
        """Tensors of the parameters' shapes from their parts on all processes; collective."""
        flat = own.new_empty(self.layout.size)
        self._processes.transfer.start_wholes([(own.detach(), flat)])()
        return self.layout.views(flat)


class Shards:
    """Model, optimizer and averages, sharded over processes.

    `optimizer` then updates this process's parts, which stand in its groups, and its state is theirs. What a checkpoint
    keeps is whole: `optimizer_tensors`, `load_optimizer`, and the averages' own `whole` and `load`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        processes: Processes,
        averages: Averages | None = None,
    ):
        """Take over a model's memory; collective: weights, buffers and averages become the first process's.

        Raises:
            ConfigError: for an optimizer whose update of an element depends on others.
            ValueError: if the optimizer has made steps already, or lacks a parameter of the model.

        """
        if type(optimizer) not in ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ConfigError(
                f"distributed=fsdp with {type(optimizer).__name__}: expected one of {names}, whose update is "
                "elementwise; use distributed=ddp"
            )
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._check(optimizer)
        for each in (model, *(averages.models.values() if averages is not None else ())):
            processes.follow_first([*each.parameters(), *each.buffers()])
        self.optimizer, self.processes = optimizer, processes
        self._index = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        self.shards: list[Shard] = []
        for group in optimizer.param_groups:
            # A backward pass arrives at the last parameters first.
            members = set(group["params"])
            given = [p for p in reversed(self._names) if p in members]
            shards = [Shard(bucket, processes) for bucket in filled(given)]
            group["params"] = [shard.own for shard in shards]
            self.shards += shards
        if averages is not None:
            averages.share(self._shared_average, [shard.own.detach() for shard in self.shards])

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.state:
            raise ValueError("the optimizer has made steps already, expected a new one: load its state afterwards")
        given = {p for group in optimizer.param_groups for p in group["params"]}
        if missing := [name for p, name in self._names.items() if p not in given]:
            raise ValueError(f"{missing[0]} is not in the optimizer, expected all parameters that require gradients")
        if len(given) != len(self._names):
            raise ValueError("the optimizer has parameters that are not the model's, expected the model's alone")

    def _shared_average(self, model: nn.Module) -> SharedAverage:
        found = dict(model.named_parameters())
        return SharedAverage(self.shards, [[found[self._names[p]] for p in shard.parameters] for shard in self.shards])

    def named(self) -> dict[str, nn.Parameter]:
        """The process's parts, by the first and the last of the parameters that each has a part of."""
        part = f"part {self.processes.rank} of {self.processes.size}"
        ends = [(self._names[shard.parameters[-1]], self._names[shard.parameters[0]]) for shard in self.shards]
        return {f"{part} of {a} ... {b}": shard.own for (a, b), shard in zip(ends, self.shards, strict=True)}

    def clear(self) -> None:
        """Release all gradients."""
        for shard in self.shards:
            shard.own.grad = None
            for parameter in shard.parameters:
                parameter.grad = None

    def gather(self) -> None:
        """Give every process the weights that each has updated a part of; collective."""
        self.processes.transfer.start_wholes(
            [(shard.own.detach(), shard.memory or shard.whole) for shard in self.shards]
        )()

    def optimizer_tensors(self) -> Tensors:
        """The whole state of the optimizer on the first process's host, as if of one process; {} elsewhere; collective.

        Each tensor's name is its parameter's number in the optimizer, a dot and the name of what it is.
        """
        found: Tensors = {}
        for shard in self.shards:
            for key, value in self.optimizer.state.get(shard.own, {}).items():
                values = [value] * len(shard.parameters) if key == STEP else shard.gathered(value)
                if self.processes.leads:
                    # A view's copy is its own numbers alone.
                    found |= {
                        f"{self._index[p]}.{key}": v.to("cpu", copy=True).contiguous()
                        for p, v in zip(shard.parameters, values, strict=True)
                    }
        return found

    def load_optimizer(self, tensors: Tensors) -> None:
        """Take this process's parts of a whole state, as `optimizer_tensors` gives it on the first process."""
        state: dict[int, dict[str, Tensor]] = {}
        for number, shard in enumerate(self.shards):
            own = [self._index[p] for p in shard.parameters]
            keys = {name.partition(".")[2] for name in tensors if name.startswith(f"{own[0]}.")}
            state[number] = {
                key: tensors[f"{own[0]}.{key}"] if key == STEP else shard.part_of([tensors[f"{i}.{key}"] for i in own])
                for key in keys
            }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": {n: s for n, s in state.items() if s}, "param_groups": groups})
