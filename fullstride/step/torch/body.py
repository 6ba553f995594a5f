"""One optimizer step in plain PyTorch: what every backend runs, compiled or captured or as it is."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.device.precision import autocast
from fullstride.device.tensor_trees import micro_batches
from fullstride.step.torch.distributed.reducer import Reducer
from fullstride.step.torch.distributed.shards import Shards
from fullstride.step.torch.ema.averages import Averages
from fullstride.step.torch.metrics import Metrics, check_loss, checked_metrics, reported
from fullstride.step.torch.optimizers import set_initial_rates
from fullstride.step.torch.schedules import Schedule

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Mapping[str, Tensor | float]]]
Draw = Callable[[Any, torch.Generator | None], Any]
Guard = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]
Gradients = list[Tensor | None]
Look = Callable[[Tensor, Gradients | None], None]


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
        accumulate: number of micro-batches per step.
        clip: longest gradient norm; longer gradients are scaled to it.
        guard: whether a step with that loss and gradient norm is to be skipped, or that and what its gradient is to be
            divided by, on the device.
        precision: precision of the loss's matrix products: fp32, tf32 or bf16.
        generator: random generator.
        reducer: averages gradients and metrics over processes; None for a single process.
        shards: sharded state; None if each process keeps all of it.

    """

    loss: Loss
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: Averages
    draw: Draw | None = None
    schedule: Schedule | None = None
    accumulate: int = 1
    clip: float | None = None
    guard: Guard | None = None
    precision: str = "fp32"
    generator: torch.Generator | None = None
    reducer: Reducer | None = None
    shards: Shards | None = None

    def __call__(self, batch: Any, made: Tensor, look: Look | None = None) -> Metrics:
        """Make one step after `made` others and return its metrics: means over the samples, on the device.

        `look` is shown the loss and the gradients of `trained` before they are clipped and used.
        """
        self._set_rates(made)
        metrics = self.gradients(batch)
        if look is not None:
            look(metrics["loss"], [p.grad for p in self.trained.values()])
        metrics["grad_norm"] = norm = self.clipped()
        if self.guard is None:
            self.optimizer.step()
        else:
            self._step_guarded(self.guard, metrics["loss"], norm)
        if self.shards is not None:
            self.shards.gather()
        return metrics

    def _step_guarded(self, guard: Guard, loss: Tensor, norm: Tensor) -> None:
        """Tell the fused optimizer what to do on the device, as a gradient scaler does, for this step alone."""
        verdict = guard(loss, norm)
        harmful, shrink = verdict if isinstance(verdict, tuple) else (verdict, None)
        listening: Any = self.optimizer
        listening.found_inf = harmful.float()
        if shrink is not None:
            if self.clip is not None:  # which has made it shorter already
                shrink = (shrink * (self.clip / norm).clamp(max=1)).clamp(min=1)
            listening.grad_scale = shrink.float()
        try:
            self.optimizer.step()
        finally:
            for name in ("found_inf", "grad_scale"):
                vars(listening).pop(name, None)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

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

    def gradients(self, batch: Any) -> Metrics:
        """Leave the gradient of the mean loss in the parameters; returns the mean metrics.

        A metric that some micro-batches have not is the mean over the samples of those that have it.
        """
        self.clear()
        parts = [(batch, 1.0)] if self.accumulate == 1 else micro_batches(batch, self.accumulate)
        total, samples = dict[str, Any](), dict[str, float]()
        for number, (part, share) in enumerate(parts, 1):
            reducer = self.reducer if number == len(parts) else None  # the last pass completes the gradients
            with searched_convolutions():
                loss, metrics = self.forward(part)
                with nullcontext() if reducer is None else reducer.averaging():
                    (loss * share).backward()
            for key, value in {"loss": loss, **metrics}.items():
                total[key] = total.get(key, 0) + reported(value) * share
                samples[key] = samples.get(key, 0) + share
        if len(parts) > 1:
            total |= {key: total[key] / share for key, share in samples.items() if share < samples["loss"]}
        return total if self.reducer is None else self.reducer.metrics(total)

    def forward(self, part: Any) -> tuple[Tensor, Metrics]:
        """Compute the loss of a micro-batch with fresh random numbers, and its metrics.

        Raises:
            ValueError: if `check_loss` or `check_metrics` refuses them.

        """
        if self.draw is not None:
            part = self.draw(part, self.generator)
        with nullcontext() if self.precision == "fp32" else autocast(self.precision, self.device):
            result = self.loss(self.model, part)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        check_loss(loss)
        return loss, checked_metrics(metrics, loss)

    def _set_rates(self, made: Tensor) -> None:
        if self.schedule is None:
            return
        factor = self.schedule(made)
        for group in self.optimizer.param_groups:
            if "initial_lr" not in group:  # one that was added, or loaded from elsewhere
                set_initial_rates(self.optimizer)
            rate = group["initial_lr"] * factor
            if not isinstance(group["lr"], Tensor):
                group["lr"] = float(rate)
            elif rate.device == group["lr"].device:
                group["lr"].copy_(rate)
            else:
                group["lr"].fill_(float(rate))  # a copy from the host would wait for the device

    def clipped(self) -> Tensor:
        """Return the gradient's norm; a longer gradient than the clip length is scaled down to it.

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
            norm = self.shards.processes.transfer.total(norm.square()).sqrt()
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        return norm


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
