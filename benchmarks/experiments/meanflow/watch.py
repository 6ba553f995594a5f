"""Watch over a training by any code: scores its network at marks, ends it at the budget or the limit."""

import base64
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experiments.meanflow.jobs import metrics
from benchmarks.experiments.meanflow.record import MARKS, Record
from benchmarks.experiments.meanflow.spec import Sampler
from benchmarks.harness.time_limit import Limit
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.dataset import to_uint8
from fullstride.meanflow.evaluation.evaluator import Evaluator
from fullstride.meanflow.sampling.samplers import sample
from fullstride.meanflow.training.build import classes_of
from fullstride.process.signals import StopSignal

# Steps of a process that belong to its start: in them kernels are compiled, compared with eager ones, and recorded.
START = 5
# Shares of the budget, start-up included, at which the network is scored, too: no mark lies there but by chance.
MOMENTS = (0.4, 1.0)
SHOWN, SHOWN_SEED = 10, 7
ONE: Sampler = ("meanflow", 1)


class Clock:
    """Seconds of training over several processes.

    The first steps of each process are start-up. That of the first process is kept; what later ones need to go on is
    an accident of how a run was cut into pieces, and counts nowhere.
    """

    def __init__(self, wait: Callable[[], None], now: Callable[[], float] = time.perf_counter):
        """Start the clock of a process."""
        self.startup: float | None = None  # seconds until the first process had made its first steps; None before
        self._wait = wait
        self._now = now
        self._trained = 0.0
        self._born, self._steps = now(), 0
        self._since: float | None = None

    def go_on(self, trained: float, startup: float | None) -> None:
        """Continue after earlier processes' seconds of training and the start-up of the first."""
        self._trained, self.startup = trained, startup

    def step(self) -> None:
        """Record a step that was made, or is running on the device."""
        self._steps += 1
        if self._steps != START:
            return
        self._wait()
        self._since = self._now()
        if self.startup is None:
            self.startup = self._since - self._born

    @property
    def running(self) -> bool:
        """Return whether the process's first steps are over."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """Seconds of training on the host's clock, which may be ahead of the device."""
        return self._trained + (0.0 if self._since is None else self._now() - self._since)

    @contextmanager
    def paused(self) -> Iterator[float]:
        """Pause the clock for a block; yields the seconds of training once the device has finished its steps."""
        self._wait()
        self._trained, self._since = self.seconds, None
        try:
            yield self._trained
        finally:
            self._wait()
            self._since = self._now()


class TimeUp(Exception):  # noqa: N818, it is no error
    """End of the training's time or of this process's time; everything is saved."""


class Watch:
    """Watch that is informed of every step of a training."""

    def __init__(self, config: TrainConfig, record: Record, limit: Limit, device: torch.device):
        """Start the clock: building what is trained is part of the start-up."""
        self.config, self.record, self.limit, self.device = config, record, limit, device
        self.clock = Clock(torch.cuda.synchronize if device.type == "cuda" else lambda: None)
        self.stop = StopSignal()  # signals that end a score at once; the training saves and ends after its step
        self.pace: float | None = None  # seconds of one evaluation of the network for all samples; None before a score
        self._budget = 60 * record.values["minutes"]
        self._evaluator: Evaluator | None = None
        self._scoring = self._saving = 0.0  # seconds that the longest took

    def go_on_from(self, step: int) -> None:
        """Continue after `step` steps of earlier processes."""
        self.clock.go_on(*self.record.go_on_from(step))

    def after_step(self, step: int, network: Callable[[], nn.Module], save: Callable[[], object]) -> bool:
        """Score if a mark or a moment is reached, return whether it was, and end if the time is over.

        The network is the averaged one, u(z, r, t); `save` writes a checkpoint of this step, and calls
        `keep_clock` for it. TimeUp after saving, at the end of the budget, or if this process has no time for
        the next work.
        """
        self.clock.step()
        if not self.clock.running:
            return False
        due = [kind for kind, is_due in (("moments", self._moment_is_due), ("marks", self._mark_is_due)) if is_due()]
        for kind in due:
            if self.limit.fits(self._scoring + self._saving):
                self._score(kind, step, network, save)
        if self.record.trained:
            raise TimeUp(f"{self.clock.seconds:.0f} s of training are over")
        if not self.limit.fits(self._saving + (self._scoring if due else 0.0)):
            with self.clock.paused() as seconds:
                save()
            raise TimeUp(
                f"--limit {self.limit.seconds:g}: stopped after {seconds:.0f} s of training; "
                "run the same command to resume"
            )
        return bool(due)

    def _moment_is_due(self) -> bool:
        reached = len(self.record.values["moments"])
        assert self.clock.startup is not None
        if self.config.optimizer.decay != "constant":  # what another time would have given is another training's
            return False
        return reached < len(MOMENTS) and self.clock.startup + self.clock.seconds >= MOMENTS[reached] * self._budget

    def _mark_is_due(self) -> bool:
        return self.clock.seconds >= self._budget * (len(self.record.values["marks"]) + 1) / MARKS

    def _score(self, kind: str, step: int, network: Callable[[], nn.Module], save: Callable[[], object]) -> None:
        """Add a score to the record, after a checkpoint if it is a mark's; add nothing if a signal ends the scoring."""
        with self.clock.paused() as seconds:
            begun = time.monotonic()
            if kind == "marks":
                save()
                self._saving = max(self._saving, time.monotonic() - begun)
            self.stop.unless_stopped(lambda: self.evaluator)  # which takes its time once
            begun, score = time.monotonic(), self._mark if kind == "marks" else self._scored
            if (found := self.stop.unless_stopped(lambda: score(step, seconds, network()))) is not None:
                self._scoring = max(self._scoring, time.monotonic() - begun)
                self.record.values[kind].append(found)
                self.record.write_work()

    @property
    def share(self) -> float:
        """Fraction of the budget that is used up, 0 to 1."""
        return min(1.0, self.clock.seconds / self._budget)

    def keep_clock(self, step: int) -> None:
        """Write the clock of a checkpoint before the checkpoint, which is useless without it."""
        self.record.values["saved"][str(step)] = self.clock.seconds
        self.record.values["startup"] = self.clock.startup
        self.record.write_work()

    def _scored(self, step: int, seconds: float, network: nn.Module) -> dict[str, Any]:
        assert self.clock.startup is not None
        return {
            "step": step,
            "seconds": seconds,
            "with start-up": seconds + self.clock.startup,
            "scores": self.score(network, ONE),
        }

    def _mark(self, step: int, seconds: float, network: nn.Module) -> dict[str, Any]:
        images = shown(network, self.evaluator, classes_of(self.config.model, self.evaluator.data.num_classes))
        encoded = base64.b64encode(to_uint8(images).numpy().tobytes()).decode()
        return self._scored(step, seconds, network) | {"shown": encoded, "channels": images.shape[1]}

    @property
    def evaluator(self) -> Evaluator:
        """Evaluator, built at first use while the clock is paused."""
        if self._evaluator is None:
            self._evaluator = Evaluator(load_data(self.config.data), self.config.evaluation, self.device)
        return self._evaluator

    def score(self, network: nn.Module, sampler: Sampler) -> dict[str, float]:
        """Score a sampler of a network."""
        classes = classes_of(self.config.model, self.evaluator.data.num_classes)
        found = self.evaluator.sampler_score(network, *sampler, classes)
        assert found is not None  # nothing ends this one's parts
        self.record.rest_on(metrics(self.evaluator.floor))
        self.pace = found.seconds / found.nfe
        return {"NFE": found.nfe} | metrics(found.score)


def shown(network: nn.Module, evaluator: Evaluator, classes: int) -> Tensor:
    """Generate the same few one-step samples each time, (n, c, h, w), cycling through the classes if there are any."""
    shape, device = evaluator.data.image_shape, evaluator.device
    asked = {"num": SHOWN, "shape": shape, "seed": SHOWN_SEED, "device": device, "num_classes": classes}
    label = torch.arange(SHOWN) % classes if classes else None
    return sample(network, sampler="meanflow", steps=1, label=label, **asked).images
