"""Training steps of the two compared codes: ours, and the official one's in its own loop."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.meanflow.official_code import build, opened, run_epoch
from fullstride.device import memory
from fullstride.device.precision import exact_fp32, set_precision
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.dataset import Dataset, Split
from fullstride.meanflow.models.import_song_unet import from_py_meanflow
from fullstride.meanflow.objective.derivative import velocity_and_derivative
from fullstride.meanflow.training.build import augment_dim, build_model, build_state
from fullstride.meanflow.training.objective import build_objective
from fullstride.meanflow.training.step import build_step, randomize_zero_layers, schedule
from fullstride.measure.gate import require_close
from fullstride.measure.timing import HostClock, Timing
from fullstride.step.torch.runners.graph import WARM

SHAPE = (3, 32, 32)
PICTURES = 2048
# Steps of each code before those that count: of ours the compile, and the record with its first replays.
UNCOUNTED = WARM + 3
# fp32's rounding in a network of some fifty layers and their tangents; t and r exchanged is off by 1e-3.
TOLERANCE = 1e-4
CHECKED = 4  # pictures


def pictures(batch_size: int) -> Dataset:
    """Return random images in place of CIFAR-10's, at least a batch; their content does not affect the time."""
    count = max(PICTURES, batch_size)
    drawn = torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = Split(drawn, torch.zeros(count, dtype=torch.long))
    return Dataset("cifar10", split, split, 10, SHAPE, "random bytes")


def _synchronized(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _peak(device: torch.device) -> int | None:
    return memory.peak_memory(device) if device.type == "cuda" else None


class Ours:
    """Steps of a trainer without its files."""

    def __init__(self, config: TrainConfig, device: torch.device):
        set_precision(config.precision, device)
        data, self._device = pictures(config.data.batch_size), device
        self._state = build_state(config, data, device)
        objective = build_objective(config, data, self._state.ema)
        self._train_step = build_step(config, objective, self._state, schedule(config.optimizer, config.epochs))
        self._raw, self._size = data.train.records.to(device), config.data.batch_size  # pyright: ignore[reportAttributeAccessIssue]
        self.errors = self._train_step.errors  # of each form that the step's gate compared with eager fp32

    def timing(self, steps: int) -> Timing:
        """Time `steps` steps, each from the choice of its batch to the end of its work on the device."""
        clock = HostClock(_synchronized(self._device))
        first, *_ = [clock.time(self._step) for _ in range(WARM + 1)]
        # Recorded anew, without the comparison with eager fp32, whose memory is no step's.
        optimizer = self._state.optimizer
        optimizer.load_state_dict(optimizer.state_dict())
        for step in range(UNCOUNTED):
            if step == WARM:
                memory.release(self._device)
            self._step()
        peak = _peak(self._device)  # a replay does not show what its record holds
        return Timing(first, tuple(clock.time(self._step) for _ in range(steps)), peak)

    def _step(self) -> None:
        first = self._train_step.made * self._size % (len(self._raw) - self._size + 1)
        raw = self._raw[first : first + self._size]
        self._train_step({"raw": raw, "labels": torch.zeros(self._size, dtype=torch.long, device=self._device)})

    def end(self) -> None:
        """Release the captured graphs."""
        self._train_step.end()


class _Timed:
    """Loader for the official loop: batches on the device; a step is the time between two of them."""

    def __init__(self, batch: Tensor, steps: int):
        """Repeat the batch for a number of steps, after some warm-up steps."""
        self._batch, self._steps, self.samples_ms = batch, UNCOUNTED + steps, list[float]()

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        wait = _synchronized(self._batch.device)
        for i in range(self._steps):
            if i == UNCOUNTED:
                memory.release(self._batch.device)
            wait()
            start = time.perf_counter()
            yield self._batch, i
            wait()
            self.samples_ms.append(1e3 * (time.perf_counter() - start))


class Theirs:
    """Steps of the official code in its own loop."""

    def __init__(self, config: TrainConfig, checkout: Path, device: torch.device):
        """Build its network, and ours with its weights; ConfigError if the checkout cannot be used, or its network has
        another number of weights.
        """
        self._code, self._args = opened(config, checkout)
        self._args.start_epoch = 0
        self._config, self._device = config, device
        unwritten = Path(tempfile.gettempdir()) / "official.pt"
        self._training = build(self._code, config, pictures(config.data.batch_size), self._args, lambda: 0.0, unwritten)
        loop = self._code["training.train_loop"]
        self._step = torch.compile(loop.train_step, disable=not self._args.compile)
        self._batch = torch.rand(config.data.batch_size, *SHAPE, device=device)

    def error_of_ours(self) -> float:
        """Relative error of u and du/dt by our network with its weights, none of which is as good as zero, in fp32;
        GateError if they are not the same function.
        """
        theirs, config = self._training.model.net, self._config
        randomize_zero_layers(theirs, torch.Generator(self._device).manual_seed(0))
        ours = build_model(config.model, SHAPE, 0, augment_dim=augment_dim(config.data)).to(self._device).eval()
        state = {f"net.{name}": value for name, value in theirs.state_dict().items()}
        ours.load_state_dict(from_py_meanflow(state, "net"))
        z, v = (torch.randn(CHECKED, *SHAPE, device=self._device) for _ in range(2))
        t, r = torch.tensor([[0.9, 0.5, 0.7, 1.0], [0.0, 0.5, 0.2, 0.6]], device=self._device)
        length = augment_dim(config.data)
        assert isinstance(length, int)
        labels = torch.rand(CHECKED, length, device=self._device)
        theirs.eval()
        with exact_fp32(self._device), torch.no_grad():
            found = velocity_and_derivative(ours, z, r, t, v, {"augment": labels} if labels.numel() else {})
            at = lambda z, t: theirs(z, (t, t - r), labels if labels.numel() else None)  # noqa: E731
            expected = torch.func.jvp(at, (z, t), (v, torch.ones_like(t)))
        theirs.train()
        names = ("our network with py-meanflow's weights: u", "our network with py-meanflow's weights: du/dt")
        return max(require_close(n, a, b, TOLERANCE) for n, a, b in zip(names, found, expected, strict=True))

    def timing(self, steps: int, *, ready: bool = False) -> Timing:
        """Time `steps` steps, each from its batch to the end of its work.

        If `ready`, the batch is augmented beforehand, outside the timed steps.
        """
        loop: Any = self._code["training.train_loop"]
        batches, pipe = _Timed(self._batch, steps), loop.augment_pipe
        if ready:
            augmented = pipe(2 * self._batch - 1)
            loop.augment_pipe = lambda _: augmented
        try:
            run_epoch(self._code, self._training, self._step, batches, self._args)
        finally:
            loop.augment_pipe = pipe
        samples = batches.samples_ms
        return Timing(samples[0], tuple(samples[UNCOUNTED:]), _peak(self._device))
