"""One optimizer step in plain PyTorch: what every backend runs, compiled or captured or as it is."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fullstride.precision import autocast
from fullstride.step.torch.reducer import Reducer
from fullstride.step.torch.schedules import Schedule
from fullstride.step.torch.shards import Shards

Metrics = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Metrics]]
Draw = Callable[[Any, torch.Generator | None], Any]
Guard = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]


def batch_size(batch: Any) -> int:
    """How many samples a batch has.

    Raises:
        ValueError: if its tensors disagree, or there is none, or no sample.

    """
    leading = {leaf.shape[:1] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)}
    if len(leading) != 1 or not (sizes := next(iter(leading))) or not sizes[0]:
        found = sorted(map(tuple, leading)) or "none"
        raise ValueError(f"the batch's tensors have first dimensions {found}, expected one size for all, of 1 or more")
    return sizes[0]


def micro_batches(batch: Any, count: int) -> list[Any]:
    """The batch cut into at most `count` parts along the first dimension, as equal as can be."""
    size = batch_size(batch)
    count = min(count, size)
    bounds = [size * i // count for i in range(count + 1)]
    cut = lambda a, b: pytree.tree_map(lambda x: x[a:b] if isinstance(x, Tensor) else x, batch)  # noqa: E731
    return [batch] if count == 1 else [cut(a, b) for a, b in itertools.pairwise(bounds)]


def check_loss(loss: Any) -> None:
    """Check what a loss function returned as its loss, by its shape and dtype alone: nothing waits for the device.

    Raises:
        ValueError: if it is no tensor of shape () and a real floating dtype.

    """
    if not isinstance(loss, Tensor):
        what = f"a tuple of {len(loss)}" if isinstance(loss, tuple) else f"a {type(loss).__name__}"
        raise ValueError(f"loss_fn returned {what}; expected a scalar tensor, or the pair of it and metrics by name")
    if loss.shape or not loss.is_floating_point():
        expected = "a scalar: take its mean" if loss.shape else "a floating dtype"
        raise ValueError(f"loss_fn returned a loss of {_kind(loss)}; expected {expected}")


def check_metrics(metrics: dict[str, Any]) -> None:
    """Check what a loss function returned as metrics, likewise.

    Raises:
        ValueError: if one is no real tensor of shape (), or has a name of the step's.

    """
    if taken := {"loss", "grad_norm"} & metrics.keys():
        raise ValueError(f"the loss has metrics named {sorted(taken)}, expected other names: a step adds these")
    for name, value in metrics.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"the loss has a metric {name} that is a {type(value).__name__}, expected a scalar tensor")
        if value.shape or value.is_complex():
            raise ValueError(
                f"the loss has a metric {name} of {_kind(value)}, expected a real scalar, such as its mean"
            )


def _kind(tensor: Tensor) -> str:
    """As in float32[4,2]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


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


@dataclass(frozen=True)
class Body:
    """The parts of a step that never change; calling it makes one.

    Attributes:
        loss: of a module and a micro-batch.
        model: what is trained.
        optimizer: over the model's parameters.
        draw: what is random, between a micro-batch and the loss; it stays eager where the loss is compiled.
        schedule: factor of each group's first learning rate.
        accumulate: micro-batches of a step.
        clip: longest gradient; longer ones are scaled to it.
        guard: whether a step with that loss and gradient norm is to be skipped, or that and what its gradient is to be
            divided by, on the device.
        precision: of the loss's products: fp32, tf32 or bf16.
        generator: of what is random.
        reducer: makes gradients and metrics means over processes; None where there is one.
        shards: what each process keeps a part of; None where each keeps all.

    """

    loss: Loss
    model: nn.Module
    optimizer: torch.optim.Optimizer
    draw: Draw | None
    schedule: Schedule | None
    accumulate: int
    clip: float | None
    guard: Guard | None
    precision: str
    generator: torch.Generator | None
    reducer: Reducer | None = None
    shards: Shards | None = None

    def __call__(self, batch: Any, made: Tensor) -> Metrics:
        """One step after `made` others, and its metrics: means over the samples, on the device."""
        self._set_rates(made)
        metrics = self.gradients(batch)
        metrics["grad_norm"] = norm = self.clipped()
        if self.guard is not None:
            self._judge(self.guard, metrics["loss"], norm)
        self.optimizer.step()
        if self.shards is not None:
            self.shards.gather()
        return metrics

    def _judge(self, guard: Guard, loss: Tensor, norm: Tensor) -> None:
        """Tell the fused optimizer what to do on the device, where it listens to a gradient scaler."""
        verdict = guard(loss, norm)
        harmful, shrink = verdict if isinstance(verdict, tuple) else (verdict, None)
        self.optimizer.found_inf = harmful.float()  # pyright: ignore[reportAttributeAccessIssue]
        if shrink is not None:
            if self.clip is not None:  # which has made it shorter already
                shrink = (shrink * (self.clip / norm).clamp(max=1)).clamp(min=1)
            self.optimizer.grad_scale = shrink.float()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """What ends up with gradients on this process, by name."""
        return dict(self.model.named_parameters()) if self.shards is None else self.shards.named()

    def clear(self) -> None:
        """Let go of all gradients, of those that another optimizer is to take, too: a step's are its own."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.shards is not None:
            self.shards.clear()
        else:
            self.model.zero_grad(set_to_none=True)

    def gradients(self, batch: Any) -> Metrics:
        """Leave the gradient of the mean loss in the parameters; returns the mean metrics."""
        self.clear()
        total, size = {}, batch_size(batch)
        for part in (parts := micro_batches(batch, self.accumulate)):
            share = batch_size(part) / size
            with searched_convolutions():
                loss, metrics = self.forward(part)
                with self._completing(part is parts[-1]):
                    (loss * share).backward()
            for key, value in {"loss": loss, **metrics}.items():
                total[key] = total.get(key, 0) + value.detach().float() * share
        return total if self.reducer is None else self.reducer.metrics(total)

    def _completing(self, last: bool) -> AbstractContextManager[None]:
        """Around a backward pass: the last one of a step completes its gradients."""
        return self.reducer.averaging() if self.reducer is not None and last else nullcontext()

    def forward(self, part: Any) -> tuple[Tensor, Metrics]:
        """The loss of a micro-batch with fresh random numbers, and its metrics.

        Raises:
            ValueError: for what `check_loss` or `check_metrics` refuses.

        """
        if self.draw is not None:
            part = self.draw(part, self.generator)
        with autocast(self.precision, next(self.model.parameters()).device):
            result = self.loss(self.model, part)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        check_loss(loss)
        check_metrics(metrics)
        return loss, metrics

    def _set_rates(self, made: Tensor) -> None:
        if self.schedule is None:
            return
        factor = self.schedule(made)
        for group in self.optimizer.param_groups:
            if "initial_lr" not in group:  # one that was added, or loaded from elsewhere
                group["initial_lr"] = float(group["lr"])
            rate = group["initial_lr"] * factor
            if not isinstance(group["lr"], Tensor):
                group["lr"] = float(rate)
            elif rate.device == group["lr"].device:
                group["lr"].copy_(rate)
            else:
                group["lr"].fill_(float(rate))  # a copy from the host would wait for the device

    def clipped(self) -> Tensor:
        """The gradient's norm, which is scaled to the longest where it is longer.

        Raises:
            ValueError: for a sparse gradient.

        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        try:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        except NotImplementedError as error:
            sparse = [n for n, p in self.trained.items() if p.grad is not None and p.grad.is_sparse]
            if not sparse:
                raise
            raise ValueError(
                f"{sparse[0]} has a sparse gradient, expected dense ones: build it with sparse=False"
            ) from error
        if self.shards is not None:
            norm = self.shards.processes.total(norm.square()).sqrt()
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        return norm
