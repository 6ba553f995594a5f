"""One optimizer step in plain PyTorch: what every backend runs, compiled or captured or as it is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullstride.device.precision import autocast
from fullstride.device.tensor_trees import micro_batches
from fullstride.step.torch.accumulation import Accumulation
from fullstride.step.torch.clipping import Clip, of_values, refuse_sparse
from fullstride.step.torch.distributed.processes import SINGLE, Processes
from fullstride.step.torch.distributed.reducer import Reducer
from fullstride.step.torch.distributed.shards import Shards
from fullstride.step.torch.distributed.wrappers import groups_of, mean_over, unsynchronised
from fullstride.step.torch.ema.averages import Averages
from fullstride.step.torch.metrics import Metrics, WeightedSums, check_loss, checked_metrics, or_one, times
from fullstride.step.torch.optimizers import Optimizers, scaled, set_rates, unscale
from fullstride.step.torch.passes import ONE, PASSES
from fullstride.step.torch.schedules import Schedule

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Mapping[str, Tensor | float]]]
Draw = Callable[[Any, torch.Generator | None], Any]
Verdict = Tensor | tuple[Tensor, Tensor]
Guard = Callable[[Tensor, Tensor], Verdict]
Gradients = list[Tensor | None]
Look = Callable[[Tensor, Gradients | None], None]
Parts = Sequence[tuple[Any, Tensor | float]]  # micro-batches, and the share of each in the means


@contextmanager
def searched_convolutions() -> Iterator[None]:
    """Let cuDNN time its algorithms for each new shape and keep the fastest, unless kernels must be deterministic."""
    backend = torch.backends.cudnn
    before, fixed = backend.benchmark, backend.deterministic or torch.are_deterministic_algorithms_enabled()
    backend.benchmark = before or not fixed
    try:
        yield
    finally:
        backend.benchmark = before


@dataclass(frozen=True, kw_only=True)
class Body:
    """Parts of a step that never change; calling it makes one step.

    Attributes:
        loss: function of a module and a micro-batch.
        model: module to train.
        optimizer: optimizer of the model's parameters.
        ema: averages of the weights; the runner updates them after a step.
        draw: random part between a micro-batch and the loss; it stays eager if the loss is compiled.
        schedule: factor of each group's first learning rate.
        accumulate: micro-batches of a step, and what weighs them.
        clip: limit of the gradients.
        guard: whether a step with that loss and gradient norm is to be skipped, or that and what its gradient is to be
            divided by, on the device.
        precision: precision of the loss's matrix products: fp32, tf32, bf16 or fp16.
        scaler: scale of the loss, by which fp16 gradients do not underflow.
        generator: random generator.
        processes: processes that make each step together.
        reducer: averages gradients and metrics over them; None for a single process.
        shards: sharded state; None if each process keeps all of it.
        passes: how the optimizer has the loss evaluated, one of `passes.PASSES`.
        fullgraph: whether a compiled loss has to be one graph.
        dense: whether a sparse gradient is refused, as by all that is compiled or captured.

    """

    loss: Loss
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: Averages
    draw: Draw | None = None
    schedule: Schedule | None = None
    accumulate: Accumulation = field(default_factory=Accumulation)
    clip: Clip | None = None
    guard: Guard | None = None
    precision: str = "fp32"
    scaler: torch.amp.GradScaler | None = None
    generator: torch.Generator | None = None
    processes: Processes = SINGLE
    reducer: Reducer | None = None
    shards: Shards | None = None
    passes: str = ONE
    fullgraph: bool = True
    dense: bool = False

    def __call__(self, batch: Any, made: Tensor, look: Look | None = None) -> Metrics:
        """Make one step after `made` others and return its metrics: means over the samples, on the device.

        `look` is shown the loss and the gradients of `trained` before they are clipped and used; of several passes,
        those of the first one.
        """
        if self.schedule is not None:
            set_rates(self.optimizer, self.schedule, made)
        if self.passes == ONE:
            metrics = self.finished(self.gradients(batch), look)
            self._update(metrics)
        else:
            # All passes see the same noise and augmentation, as they do in a loop that draws before them.
            parts = [(self._drawn(part), share) for part, share in self.parts(batch)]
            metrics = PASSES[self.passes](replace(self, draw=None), parts, look)
        if self.shards is not None:
            self.shards.gather()
        return metrics

    def _update(self, metrics: Metrics) -> None:
        if self.guard is not None:
            guarded(self.optimizer, self.guard(metrics["loss"], metrics["grad_norm"]), self.clip, metrics["grad_norm"])
        elif self.scaler is not None:
            scaled(self.optimizer, self.scaler)
        else:
            self.optimizer.step()

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @cached_property
    def groups(self) -> list[dist.ProcessGroup]:
        """Groups over which a wrapper around the model averages gradients; none without a wrapper."""
        return groups_of(self.model)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters with gradients on this process, by name: the model's, and any others in the optimizer."""
        if self.shards is not None:
            return self.shards.named()
        own = dict(self.model.named_parameters())
        known = set(map(id, own.values()))
        for number, group in enumerate(self.optimizer.param_groups):
            others = {f"parameter {i} of the optimizer's group {number}": p for i, p in enumerate(group["params"])}
            own |= {name: p for name, p in others.items() if id(p) not in known}
        return own

    def clear(self) -> None:
        """Release all gradients, including those of parameters that another optimizer owns."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.shards is not None:
            self.shards.clear()
        else:
            self.model.zero_grad(set_to_none=True)

    def parts(self, batch: Any) -> Parts:
        """Cut a batch into micro-batches, with their shares in the step's means."""
        given = self.accumulate
        parts = [(batch, 1.0)] if given.parts == 1 else micro_batches(batch, given.parts)
        if not callable(given.weight) or not self._weighs(len(parts)):
            return parts
        weights = [given.weight_of(part, self.device) for part, _ in parts]
        total = self._mean({"weight": torch.stack(weights).sum()})["weight"]
        return [(part, weight / or_one(total)) for (part, _), weight in zip(parts, weights, strict=True)]

    def _weighs(self, parts: int) -> bool:
        """Return whether weights make a difference."""
        return self.accumulate.weight is not None and (parts > 1 or self.processes.size > 1 or bool(self.groups))

    def _mean(self, values: Metrics) -> Metrics:
        """Return means over all processes, those of a wrapper around the model too."""
        return mean_over(self.groups, self.processes.mean(values))

    def finished(self, metrics: Metrics, look: Look | None) -> Metrics:
        """Unscale and clip the gradients; returns the metrics with their norm."""
        if self.scaler is not None:
            unscale(self.optimizer, self.scaler)
        if look is not None:
            look(metrics["loss"], [p.grad for p in self.trained.values()])
        return metrics | {"grad_norm": self.clipped()}

    def gradients(self, batch: Any) -> Metrics:
        """Leave the gradient of the mean loss, times the scaler's scale, in the parameters; returns the mean metrics.

        A metric that some micro-batches have not is the mean over those that have it.
        """
        return self.gradients_of(self.parts(batch))

    def gradients_of(self, parts: Parts) -> Metrics:
        """`gradients` of micro-batches with their shares."""
        self.clear()
        sums = WeightedSums()
        named = isinstance(self.accumulate.weight, str) and self._weighs(len(parts))
        for number, (part, share) in enumerate(parts, 1):
            last = number == len(parts)  # its pass completes the gradients
            reducer = self.reducer if last else None
            with searched_convolutions(), nullcontext() if last else unsynchronised(self.model):
                loss, metrics = self.forward(part)
                weight = self.accumulate.pop(metrics) if named else share
                with nullcontext() if reducer is None else reducer.averaging():
                    self._scaled(times(loss, weight)).backward()
            sums.add({"loss": loss, **metrics}, weight)
        if not self._weighs(len(parts)):
            return sums.means() if self.reducer is None else self.processes.mean(sums.means())
        metrics, total = sums.weighted_means(self._mean)
        return metrics | self._divided(total) if named else metrics

    def _divided(self, total: Tensor) -> Metrics:
        """Divide the gradients by the mean weight of a process; returns the weight of all, by its metric's name."""
        torch._foreach_div_([p.grad for p in self.trained.values() if p.grad is not None], or_one(total))
        assert isinstance(self.accumulate.weight, str)
        count = self.processes.size
        for group in self.groups:
            count *= group.size()
        return {self.accumulate.weight: total * count}

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _drawn(self, part: Any) -> Any:
        return part if self.draw is None else self.draw(part, self.generator)

    def forward(self, part: Any) -> tuple[Tensor, Metrics]:
        """Compute the loss of a micro-batch with fresh random numbers, and its metrics.

        Raises:
            ValueError: if `check_loss` or `check_metrics` refuses them.

        """
        part = self._drawn(part)
        with nullcontext() if self.precision == "fp32" else autocast(self.precision, self.device):
            result = self.loss(self.model, part)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        check_loss(loss)
        return loss, checked_metrics(metrics, loss)

    def clipped(self) -> Tensor:
        """Return the gradient's norm; a gradient beyond the clip's limit is brought within it.

        Raises:
            StepError: for a sparse gradient, if they have to be dense.

        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        try:
            norm = total_norm([p.grad for p in parameters if p.grad is not None])
        except NotImplementedError:  # which looking at each gradient would cost every step
            if self.dense:
                refuse_sparse(self.trained)
            norm = total_norm([of_values(p.grad) for p in parameters if p.grad is not None])
        if self.shards is not None:
            norm = self.shards.processes.transfer.total(norm.square()).sqrt()
        if self.clip is not None:
            self.clip(parameters, norm)
        return norm


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, of sharded ones as wholes.

    Raises:
        NotImplementedError: for sparse ones; see `of_values`.

    """
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def guarded(optimizer: torch.optim.Optimizer, verdict: Verdict, clip: Clip | None, norm: Tensor) -> None:
    """Tell fused optimizers what to do on the device, as a gradient scaler does, for this step alone.

    Args:
        optimizer: that steps.
        verdict: whether to skip the step, or that and what its gradient is to be divided by.
        clip: that has shortened the gradient already.
        norm: of the gradient before.

    """
    harmful, shrink = verdict if isinstance(verdict, tuple) else (verdict, None)
    listening: list[Any] = optimizer.members if isinstance(optimizer, Optimizers) else [optimizer]
    for each in listening:
        each.found_inf = harmful.float()
    if shrink is not None:
        if clip is not None and clip.norm is not None:
            shrink = (shrink * (clip.norm / norm).clamp(max=1)).clamp(min=1)
        for each in listening:
            each.grad_scale = shrink.float()
    try:
        optimizer.step()
    finally:
        for each in listening:
            for name in ("found_inf", "grad_scale"):
                vars(each).pop(name, None)


@dataclass(eq=False)
class Runner:
    """Runner of steps by an eager body; one compiled for the expected shapes leaves other batches to the eager one.

    Attributes:
        backend: its name.
        body: by which it makes them, compiled if it compiles.
        eager: by which it makes those of other batches.

    """

    backend: str
    body: Body
    eager: Body

    @property
    def compiles(self) -> bool:
        """Return whether steps of the expected shapes are compiled."""
        return self.body is not self.eager

    def form(self, expected: bool) -> str:
        """Name of the form in which the next step runs; each form is checked separately."""
        return f"backend={self.backend}, {'usual' if expected else 'other'} shapes"

    def __call__(self, batch: Any, made: int, *, expected: bool, look: Look | None = None) -> Metrics:
        """Make one step after `made` others, and update the averages; `look` is given loss and gradients first."""
        body = self.body if expected else self.eager
        metrics = body(batch, torch.tensor(made), look)
        if body.ema.due(made + 1):
            body.ema.follow(torch.tensor(made + 1))
        return metrics

    def forget(self) -> None:
        """Start over, as after a checkpoint was loaded."""

    def end(self) -> None:
        """Release captured graphs."""
