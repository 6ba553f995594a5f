"""A step as one launch: recorded in a CUDA graph after a few real steps, and replayed."""

from typing import Any

import torch
from torch import Tensor

from fullstride.files import note
from fullstride.recording import CudaGraph, dense, fill, on, place_of
from fullstride.step.torch.body import Body, Metrics
from fullstride.step.torch.gate import StepError
from fullstride.step.torch.runner import Follow
from fullstride.step.torch.usual import Usual

# Real steps that are made before one is captured: libraries choose their algorithms and optimizers their state.
WARM = 3


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


def settings(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What a record has of an optimizer's groups as it was, without the rates, which it reads; nothing waits."""
    told = lambda value: id(value) if isinstance(value, Tensor) else value  # noqa: E731
    return [
        (
            {k: told(v) for k, v in group.items() if k not in ("lr", "params")},
            [p.requires_grad for p in group["params"]],
        )
        for group in optimizer.param_groups
    ]


class Replayed:
    """Runs the body a few times, records it, and replays it from then on.

    A step is one launch: its inputs are copied to where the record reads them, random numbers go on from the
    generator's state, and metrics are copied from where it leaves them. Batches of other shapes run as they are. A
    learning rate that is set is written to where the record reads it; after any other change of the optimizer's groups
    the step is recorded anew.
    """

    def __init__(self, body: Body, eager: Body, follow: Follow, usual: Usual, record: Any = CudaGraph):
        """Take a body, the one for other shapes, and which are usual."""
        self.body, self.eager, self._follow, self._usual, self._record = body, eager, follow, usual, record
        self._made = torch.zeros((), dtype=torch.int64, device=next(body.model.parameters()).device)
        self._stream, self._told = torch.cuda.Stream() if self._made.is_cuda else None, False
        self.forget()

    def forget(self) -> None:
        """Record anew, as after a checkpoint was loaded."""
        self._rates = prepared(self.body.optimizer, self._made.device)
        self._groups = settings(self.body.optimizer)
        self._warm = 0
        self._inputs: Any = None
        self._step = self._behind = None
        self._names: list[str] = []
        self._gradients: list[Tensor | None] = []
        self._lent: list[tuple[Tensor, Tensor]] = []

    def end(self) -> None:
        """Let go of what is recorded, without a word to the device, which may be waiting for a process that is gone."""
        self._step = self._behind = None

    def form(self, batch: Any) -> str:
        """As it is, and recorded; other shapes than the usual apart."""
        if not self._usual.fits(batch):
            return "other shapes"
        return "recorded" if self._warm == WARM else "usual shapes"

    def gradients(self) -> list[Tensor | None]:
        """The last step's."""
        return self._gradients

    def _look_at_groups(self) -> None:
        """Begin anew if anything but a rate was changed in them since the last step, and hand rates to the record."""
        if self._groups != settings(self.body.optimizer):
            if self._warm and self._step is None and not self._told:
                note(
                    "a recorded step: the optimizer's groups changed again before it could be recorded; as long as "
                    "they do at every step, as by OneCycleLR(cycle_momentum=True), steps run as they are"
                )
                self._told = True
            self.forget()
        for group, rate in zip(self.body.optimizer.param_groups, self._rates, strict=True):
            if (given := group["lr"]) is not rate:
                group["lr"] = rate.copy_(given) if isinstance(given, Tensor) else rate.fill_(given)

    def __call__(self, batch: Any, made: int) -> Metrics:
        """One step.

        Raises:
            StepError: for a network that cannot be recorded.

        """
        self._look_at_groups()
        if not self._usual.fits(batch):
            return self._run(self.eager, batch, made)
        if self._warm < WARM:
            self._warm += 1
            return self._run_in_place(batch, made)
        if self._step is None:
            self._capture(batch)
        return self._replay(batch, made)

    def _run_in_place(self, batch: Any, made: int) -> Metrics:
        """As it is; a record would read every time what a buffer was when it was made."""
        before = self._buffers()
        metrics = self._run(self.body, dense(batch), made)
        if moved := [name for name, place in self._buffers().items() if before.get(name, place) != place]:
            raise StepError(
                f"a recorded step: the forward pass puts new tensors in the place of the buffers {', '.join(moved)}, "
                "expected that it writes into them, as in self.NAME.copy_(value); or use backend=eager or compile"
            )
        return metrics

    def _buffers(self) -> dict[str, int]:
        return {name: buffer.data_ptr() for name, buffer in self.body.model.named_buffers()}

    def _run(self, body: Body, batch: Any, made: int) -> Metrics:
        """On the stream of the capture, so that what libraries keep a stream is there."""
        with on(self._stream):
            self._made.fill_(made)
            metrics = body(batch, self._made)
            if self._follow.due(made + 1):
                self._follow.follow(self._made + 1)
        self._gradients = [p.grad for p in self.body.trained.values()]
        self._groups = settings(self.body.optimizer)  # the schedule notes the first rate of a group that is new
        return metrics

    def _capture(self, batch: Any) -> None:
        self._inputs = place_of(batch)
        self.body.clear()
        generator = self.body.generator
        with on(self._stream):
            self._step = self._record(self._once, generator)
            self._recorded = [p.grad for p in self.body.trained.values()]
            self._lent = self._of_others()
            if self._follow.due(0):  # if it ever is
                self._follow.get_ready(self._made.device)  # a long period may not have ended yet
                self._behind = self._record(self._averages, generator)

    def _of_others(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters that another optimizer is to step, with the gradients that the record leaves them."""
        own = {id(p) for group in self.body.optimizer.param_groups for p in group["params"]}
        parts = [] if self.body.shards is not None else self.body.model.parameters()
        return [(p, p.grad) for p in parts if id(p) not in own and p.grad is not None]

    def _once(self) -> Tensor:
        metrics = self.body(self._inputs, self._made)
        self._made.add_(1)
        self._names = list(metrics)
        return torch.stack([value.float() for value in metrics.values()])

    def _averages(self) -> None:
        self._follow.follow(self._made)

    def _replay(self, batch: Any, made: int) -> Metrics:
        assert self._step is not None
        fill(self._inputs, batch)
        self._made.fill_(made)
        self._gradients = self._recorded
        values = self._step.replay().clone()
        for parameter, gradient in self._lent:  # whoever takes it may have let go of it since
            parameter.grad = gradient
        if self._behind is not None and self._follow.due(made + 1):
            self._behind.replay()
        return dict(zip(self._names, values.unbind(), strict=True))
