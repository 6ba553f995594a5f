"""Registry of the trackers, and one that costs a training nothing but its numbers."""

import importlib
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from rich.console import Console

from fullstride.errors import ConfigError, one_of
from fullstride.extras import how_to_install
from fullstride.runs.trackers.tracked_run import TrackedRun


@runtime_checkable
class Backend(Protocol):
    """Protocol of an open tracker."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record values at an optimizer step."""

    def close(self, state: str) -> None:
        """Write out what is pending, and how the run ended: finished, stopped, failed, or still running."""


class Row(NamedTuple):
    """A tracker: the package it needs, how to install that, and `module:name` of what opens it for a `TrackedRun`."""

    package: str
    install: str
    opener: str


TRACK = how_to_install("track")
ROWS = {
    "trackio": Row("trackio", TRACK, "trackio:Trackio"),
    "tensorboard": Row("tensorboardX", TRACK, "tensorboard:open_events"),
    "prometheus": Row("prometheus_client", TRACK, "prometheus:PrometheusFile"),
    "wandb": Row("wandb", "run: pip install wandb", "wandb:WandB"),
    "mlflow": Row("mlflow", "run: pip install mlflow", "mlflow:MLflow"),
}
TRACKERS = ("none", *ROWS)


class Tracker:
    """A backend whose failures cost its numbers and not the training; without one nothing is recorded."""

    def __init__(self, name: str, backend: Backend | None):
        """Wrap an open backend."""
        self._name, self._backend = name, backend

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record values such as `train/loss` at an optimizer step; never raises.

        At the first failure it says so on stderr, once, and records nothing from then on: a half-written record may
        hide what follows, and metrics.jsonl has everything.
        """
        self._attempt(lambda backend: backend.log(step, values))

    def close(self, state: str = "finished") -> None:
        """Write out what is pending, and how the run ended, as `Backend.close`; never raises."""
        self._attempt(lambda backend: backend.close(state))
        self._backend = None

    def _attempt(self, act: Callable[[Backend], None]) -> None:
        if self._backend is None:
            return
        try:
            act(self._backend)
        except Exception as error:
            self._backend = None
            Console(stderr=True).print(
                f"track={self._name} failed and is off for the rest of this run: {type(error).__name__}: {error}; "
                "metrics.jsonl is still written",
                markup=False,
            )


def check_tracker(name: str) -> None:
    """Check that a tracker is installed, before anything is opened.

    Raises:
        ConfigError: for an unknown name, or a tracker that cannot be imported.

    """
    one_of("track", name, TRACKERS)
    if name == "none":
        return
    try:
        importlib.import_module(ROWS[name].package)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"track={name}: {error.name} is not installed; {ROWS[name].install}, or use track=none"
        ) from None


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """A tracker for a training run, one of `TRACKERS`.

    If the run has made steps, tensorboard replaces what its earlier curves have of later ones; the others cannot, and
    take no second value of a step.

    Raises:
        ConfigError: for an unknown name, a tracker that is not installed, or one that cannot be opened.

    """
    check_tracker(name)
    if name == "none":
        return Tracker(name, None)
    module, _, opener = ROWS[name].opener.partition(":")
    try:
        made = getattr(importlib.import_module(f"fullstride.runs.trackers.{module}"), opener)
        return Tracker(name, made(run))
    except Exception as error:  # trackio raises SQLite's errors, too
        raise ConfigError(f"track={name}: cannot be opened: {error}; repair that, or use track=none") from None
