"""Watches a training by any code: scores its network at marks of its time, ends it at the budget or the limit."""

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.bench.code import joined
from fullstride.errors import ConfigError
from fullstride.files import replace_file
from fullstride.meanflow.config import TrainConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.pixels import to_uint8
from fullstride.meanflow.evaluate import Evaluator
from fullstride.meanflow.experiments.clock import Clock
from fullstride.meanflow.experiments.jobs import metrics
from fullstride.meanflow.experiments.spec import Sampler
from fullstride.meanflow.samplers import sample

RECORD = "record.json"
MARKS = 10
# Shares of the budget, start-up included, at which the network is scored, too: no mark lies there but by chance.
MOMENTS = (0.4, 1.0)
SHOWN, SHOWN_SEED = 10, 7
ONE: Sampler = ("meanflow", 1)
# Up to this share floors differ by the rounding of another device; those of another classifier by more.
SAME_FLOOR = 1e-3


def alike(floors: Sequence[float]) -> bool:
    """Whether these distances of the same images are by one classifier."""
    return max(floors) - min(floors) <= SAME_FLOOR * max(floors)


class TimeUp(Exception):  # noqa: N818, it is no error
    """The training has had its time, or this process has; everything is saved."""


class Record:
    """What is known of a run, in its folder: its clock at each checkpoint, its scores at each mark."""

    def __init__(self, run: Path, minutes: float):
        """Open the record of a run, or begin one.

        Raises:
            ConfigError: if the run was begun with another budget.

        """
        self.path = run / RECORD
        known = json.loads(self.path.read_text()) if self.path.is_file() else {}
        fresh = {"minutes": minutes, "startup": None, "saved": {}, "marks": [], "moments": [], "final": {}}
        self.values: dict[str, Any] = fresh | known
        if self.values["minutes"] != minutes:
            raise ConfigError(
                f"--minutes {minutes:g}: {run} was begun with {self.values['minutes']:g}; give that, or other --runs"
            )

    def go_on_from(self, step: int) -> tuple[float, float | None]:
        """Seconds of training at a checkpoint and of the start-up; scores that come after it are forgotten.

        Raises:
            ConfigError: if there was no such checkpoint.

        """
        if step and str(step) not in self.values["saved"]:
            raise ConfigError(f"{self.path}: says nothing of step {step}; remove the run's folder and begin again")
        seconds = self.values["saved"][str(step)] if step else 0.0
        for scored in ("marks", "moments"):
            self.values[scored] = [one for one in self.values[scored] if one["step"] <= step]
        return seconds, self.values["startup"] if step else None

    def rest_on(self, floor: dict[str, float]) -> None:
        """Keep what training images score, beside which all scores of the run stand.

        Raises:
            ConfigError: if the run has scores by another classifier, or of distances that are not asked for now.

        """
        for name, known in self.values.setdefault("floor", floor).items():
            if name not in floor:
                raise ConfigError(f"{self.path}: has scores of {name}; give the run the same evaluation.features")
            if not alike((known, floor[name])):
                raise ConfigError(
                    f"{self.path}: {name} of training images is {floor[name]:.4g}, and was {known:.4g} when the run "
                    "was scored before, by another classifier; give it that one's $FULLSTRIDE_CACHE/reference"
                )

    @property
    def trained(self) -> bool:
        """Whether the budget is used up, and the last mark is there."""
        return len(self.values["marks"]) >= MARKS

    def write(self) -> None:
        """Keep it, with the code that has run so far."""
        self.values["code"] = joined([self.values.get("code", {})])
        replace_file(self.path, json.dumps(self.values, indent=1) + "\n")


class Watch:
    """Told of every step of a training."""

    def __init__(self, config: TrainConfig, record: Record, limit: float, device: torch.device):
        """Start the clock: building what is trained is part of the start-up.

        Args:
            config: of the run.
            record: of the run.
            limit: seconds after which this process saves and leaves.
            device: of the network.

        """
        self.config, self.record, self.limit, self.device = config, record, limit, device
        self.clock = Clock(torch.cuda.synchronize if device.type == "cuda" else lambda: None)
        self._budget = 60 * record.values["minutes"]
        self._evaluator: Evaluator | None = None

    def go_on_from(self, step: int) -> None:
        """Begin after `step` steps of earlier processes."""
        self.clock.go_on(*self.record.go_on_from(step))

    def after_step(self, step: int, network: Callable[[], nn.Module], save: Callable[[], None]) -> bool:
        """Score if a mark or a moment is reached, which it returns, and end if it is time.

        Args:
            step: steps made.
            network: the averaged network, u(z, r, t).
            save: writes a checkpoint of this step.

        Raises:
            TimeUp: after saving, at the end of the budget, or of this process's time.

        """
        self.clock.step()
        if not self.clock.running:
            return False
        scored = False
        if self._moment_is_reached():
            scored = True
            with self.clock.paused() as seconds:
                self._add("moments", self._scored(step, seconds, network()))
        if self.clock.seconds >= self._budget * (len(self.record.values["marks"]) + 1) / MARKS:
            scored = True
            with self.clock.paused() as seconds:
                self._save(step, seconds, save)
                self._add("marks", self._mark(step, seconds, network()))
        if self.record.trained:
            raise TimeUp(f"{self.clock.seconds:.0f} s of training are over")
        if self.clock.alive > self.limit:
            with self.clock.paused() as seconds:
                self._save(step, seconds, save)
            raise TimeUp(f"--limit {self.limit:g}: stopped after {seconds:.0f} s of training; the same command goes on")
        return scored

    def _moment_is_reached(self) -> bool:
        reached = len(self.record.values["moments"])
        assert self.clock.startup is not None
        return reached < len(MOMENTS) and self.clock.startup + self.clock.seconds >= MOMENTS[reached] * self._budget

    def _add(self, kind: str, found: dict[str, Any]) -> None:
        self.record.values[kind].append(found)
        self.record.write()

    def _save(self, step: int, seconds: float, save: Callable[[], None]) -> None:
        """The record first: a checkpoint without its clock would be of no use."""
        self.record.values["saved"][str(step)] = seconds
        self.record.values["startup"] = self.clock.startup
        self.record.write()
        save()

    def _scored(self, step: int, seconds: float, network: nn.Module) -> dict[str, Any]:
        assert self.clock.startup is not None
        return {
            "step": step,
            "seconds": seconds,
            "with start-up": seconds + self.clock.startup,
            "scores": self.score(network, ONE),
        }

    def _mark(self, step: int, seconds: float, network: nn.Module) -> dict[str, Any]:
        return self._scored(step, seconds, network) | {"shown": _bytes(shown(network, self.evaluator))}

    @property
    def evaluator(self) -> Evaluator:
        """Made when it is first needed, while the clock stands."""
        if self._evaluator is None:
            self._evaluator = Evaluator(load_data(self.config.data), self.config.evaluation, self.device)
        return self._evaluator

    def score(self, network: nn.Module, sampler: Sampler) -> dict[str, float]:
        """What a sampler of a network gets."""
        found = self.evaluator.sampler_score(network, *sampler, 0)
        assert found is not None  # nothing ends this one's parts
        self.record.rest_on(metrics(self.evaluator.floor))
        return {"NFE": found.nfe} | metrics(found.score)


def shown(network: nn.Module, evaluator: Evaluator) -> Tensor:
    """The same few one-step samples each time, (n, c, h, w)."""
    shape, device = evaluator.data.image_shape, evaluator.device
    return sample(network, sampler="meanflow", steps=1, num=SHOWN, shape=shape, seed=SHOWN_SEED, device=device).images


def _bytes(images: Tensor) -> str:
    return base64.b64encode(to_uint8(images).numpy().tobytes()).decode()
