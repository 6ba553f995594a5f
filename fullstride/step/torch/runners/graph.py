"""Step as one launch: captured in a CUDA graph after a few eager steps, and replayed."""

from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.device.cuda_graph import CudaGraph, copy_into, on_stream, static_input, without_gaps
from fullstride.runs.atomic_files import note
from fullstride.step.torch.body import Body, Gradients, Look, Loss, Runner
from fullstride.step.torch.errors import StepError
from fullstride.step.torch.metrics import Metrics, stacked, unstacked

# Real steps that are made before one is captured: libraries choose their algorithms and optimizers their state.
WARM = 3
RECORDED = "recorded"


def prepared(optimizer: torch.optim.Optimizer, device: torch.device) -> list[Tensor]:
    """Have a GPU's optimizer keep on it what a record reads and writes: the rates, which it returns, and its counts.

    Eager steps of optimizers that are neither fused nor capturable leave counts on the host.
    """
    for p, own in optimizer.state.items():
        for name, value in own.items():
            if isinstance(value, Tensor) and not value.shape and value.device != p.device:
                own[name] = value.to(p.device)
    for group in optimizer.param_groups:
        if device.type == "cuda":
            group["capturable"] = True
        group["lr"] = torch.as_tensor(float(group["lr"]), dtype=torch.float32).to(device)
    return [group["lr"] for group in optimizer.param_groups]


def settings(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> list[Any]:
    """Return the settings that a captured graph has fixed; it reads rates and the scale anew. Nothing waits."""
    told = lambda value: id(value) if isinstance(value, Tensor) else value  # noqa: E731
    if scaler is not None:
        factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        return [factors, *settings(optimizer)]
    return [
        (
            {k: told(v) for k, v in group.items() if k not in ("lr", "params")},
            [p.requires_grad for p in group["params"]],
        )
        for group in optimizer.param_groups
    ]


def _recordable(loss: Loss) -> Loss:
    """Wrap a loss to refuse metrics that are Python numbers: a replay would not recompute them.

    Raises:
        StepError: for a metric that is a Python number.

    """

    def checked(model: nn.Module, batch: Any) -> Any:
        result = loss(model, batch)
        metrics = result[1] if isinstance(result, tuple) and len(result) == 2 else {}
        if fixed := [name for name, value in metrics.items() if isinstance(value, Real)]:
            raise StepError(
                f"a captured step: the metric {fixed[0]} is a Python number, which a replay does not recompute; "
                "expected a tensor; return one, or use backend=eager or compile"
            )
        return result

    return checked


class GraphRunner(Runner):
    """Runner that makes a few eager steps, captures one, and replays it from then on.

    A step is one launch: its inputs are copied to the graph's, random numbers continue from the generator's state, and
    metrics are copied from the graph's. Batches of other shapes run uncaptured. A learning rate that is set is written
    to the graph's; after any other change of the optimizer's groups the step is captured anew.
    """

    def __init__(self, backend: str, body: Body, eager: Body, record: Any = CudaGraph):
        """Take a body, the one for other shapes, and the function that captures."""
        super().__init__(backend, body, eager)
        self._record = record
        self._made = torch.zeros((), dtype=torch.int64, device=body.device)
        self._stream = torch.cuda.Stream() if self._made.is_cuda else None
        self._told = False
        self.forget()

    def forget(self) -> None:
        """Capture anew, as after a checkpoint was loaded."""
        self._rates = prepared(self.body.optimizer, self._made.device)
        self._groups = settings(self.body.optimizer, self.body.scaler)
        self._warm = 0
        self._inputs: Any = None
        self._step = self._behind = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._recorded: Gradients = []
        self._altered = False
        self._lent: list[tuple[Tensor, Tensor]] = []

    def end(self) -> None:
        """Release the graph without synchronising the device, which may be waiting for a process that is gone."""
        self._step = self._behind = None

    def form(self, expected: bool) -> str:
        """Name of the form: eager or captured, with the expected shapes or others."""
        recorded = expected and self._warm == WARM
        return f"backend={self.backend}, {RECORDED}" if recorded else super().form(expected)

    def _look_at_groups(self) -> None:
        """Begin anew if anything but a rate was changed in them since the last step, and hand rates to the record."""
        if self._groups != settings(self.body.optimizer, self.body.scaler):
            if self._warm and self._step is None and not self._told:
                note(
                    "a captured step: the optimizer's groups changed again before it could be captured; as long as "
                    "they do at every step, as by OneCycleLR(cycle_momentum=True), steps run as they are"
                )
                self._told = True
            self.forget()
        for group, rate in zip(self.body.optimizer.param_groups, self._rates, strict=True):
            if (given := group["lr"]) is not rate:
                group["lr"] = rate.copy_(given) if isinstance(given, Tensor) else rate.fill_(given)

    def __call__(self, batch: Any, made: int, *, expected: bool, look: Look | None = None) -> Metrics:
        """Make one step.

        Raises:
            StepError: for a network or a loss that cannot be captured.

        """
        self._look_at_groups()
        if not expected:
            return self._run(self.eager, batch, made, look)
        if self._warm < WARM:
            self._warm += 1
            return self._run_in_place(batch, made, look)
        if self._step is None:
            self._capture(batch)
        metrics = self._replay(batch, made)
        if look is not None:
            look(metrics["loss"], self._gradients(metrics["grad_norm"]))
        return metrics

    def _gradients(self, norm: Tensor) -> Gradients | None:
        """The last replay's before they were clipped or divided, by their norm; None if the optimizer changed them.

        Clipped by value they stay as they are: that cannot be undone.
        """
        if self._altered:
            return None
        if self.body.clip is not None and self.body.clip.value is not None:
            return self._recorded
        stepped = {id(p) for group in self.body.optimizer.param_groups for p in group["params"]}
        given = list(zip(self.body.trained.values(), self._recorded, strict=True))
        found = torch.nn.utils.get_total_norm([x for p, x in given if x is not None and id(p) in stepped])
        if self.body.shards is not None:
            found = self.body.shards.processes.transfer.total(found.square()).sqrt()
        scale = torch.where(found > 0, norm / found, 1.0)
        return [x * scale if x is not None and id(p) in stepped else x for p, x in given]

    def _run_in_place(self, batch: Any, made: int, look: Look | None) -> Metrics:
        """Run one step uncaptured and check its buffers: a captured graph reads them where they lay at capture."""
        before = self._buffers()
        metrics = self._run(self.body, without_gaps(batch), made, look)
        if moved := [name for name, place in self._buffers().items() if before.get(name, place) != place]:
            raise StepError(
                f"a captured step: the forward pass puts new tensors in the place of the buffers {', '.join(moved)}, "
                "expected that it writes into them, as in self.NAME.copy_(value); or use backend=eager or compile"
            )
        return metrics

    def _buffers(self) -> dict[str, int]:
        return {name: buffer.data_ptr() for name, buffer in self.body.model.named_buffers()}

    def _run(self, body: Body, batch: Any, made: int, look: Look | None) -> Metrics:
        """Run on the capture's stream, so that per-stream workspaces of libraries exist."""
        with on_stream(self._stream):
            self._made.fill_(made)
            metrics = body(batch, self._made, look)
            if body.ema.due(made + 1):
                body.ema.follow(self._made + 1)
        # The schedule notes the first rate of a group that is new.
        self._groups = settings(self.body.optimizer, self.body.scaler)
        return metrics

    def _capture(self, batch: Any) -> None:
        self._inputs = static_input(batch)
        self.body.clear()
        generator = self.body.generator
        with on_stream(self._stream):
            self._step = self._record(self._once, generator)
            self._recorded = [p.grad for p in self.body.trained.values()]
            # Parameters that another optimizer is to step, with the gradients that the record leaves them.
            own = {id(p) for group in self.body.optimizer.param_groups for p in group["params"]}
            parts = [] if self.body.shards is not None else self.body.model.parameters()
            self._lent = [(p, p.grad) for p in parts if id(p) not in own and p.grad is not None]
            if self.body.ema.due(0):  # if it ever is
                self.body.ema.get_ready(self._made.device)  # a long period may not have ended yet
                self._behind = self._record(self._averages, generator)

    def _once(self) -> Tensor:
        before = list[tuple[Tensor, int]]()

        def look(_: Tensor, gradients: Gradients | None) -> None:
            before.extend((x, x._version) for x in gradients or () if x is not None)

        metrics = replace(self.body, loss=_recordable(self.body.loss))(self._inputs, self._made, look)
        groups, left = self.body.optimizer.param_groups, {id(p.grad) for p in self.body.trained.values()}
        # Clipping writes them, and once a fused optimizer, which divides them.
        known = 0 if self.body.clip is None else self.body.clip.writes
        known += any(group.get("fused") is True for group in groups)
        self._altered = any(id(x) not in left or x._version - version > known for x, version in before)
        self._made.add_(1)
        self._dtypes = {name: value.dtype for name, value in metrics.items()}
        return stacked(metrics)

    def _averages(self) -> None:
        self.body.ema.follow(self._made)

    def _replay(self, batch: Any, made: int) -> Metrics:
        assert self._step is not None
        copy_into(self._inputs, batch)
        self._made.fill_(made)
        values = self._step.replay().clone()
        for parameter, gradient in self._lent:  # whoever takes it may have let go of it since
            parameter.grad = gradient
        if self._behind is not None and self.body.ema.due(made + 1):
            self._behind.replay()
        return unstacked(values, self._dtypes)
