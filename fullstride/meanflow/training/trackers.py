"""Trackers: a run's numbers in dashboards, next to metrics.jsonl, which stays the complete record.

TensorBoard's event files go through tensorboardX's encoder and not its `SummaryWriter`, which writes from a thread: if
that dies, as on a full disk, its bounded queue blocks the training for ever. Here a full disk is an error of the step
that met it.
"""

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from fullstride.errors import ConfigError, one_of
from fullstride.extras import how_to_install

VERSION = "brain.Event:2"


class EventFile:
    """A new event file in `folder`, behind those that are there; each write reaches the file before it returns."""

    def __init__(self, folder: Path, step: int):
        """Open it for a run that has made `step` steps; a reader forgets what earlier files say of later ones."""
        from tensorboardX.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # Not as many as there are: of those before it some may have been removed.
        taken = [path.suffix[1:] for path in folder.glob("*.tfevents.*")]
        number = max((int(last) + 1 for last in taken if last.isdecimal()), default=0)
        self.path = folder / f"events.out.tfevents.{number:06}"
        self._records = RecordWriter(str(self.path))
        self._write(0, file_version=VERSION)
        self._write(step + 1, session_log=SessionLog(status=SessionLog.START))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        self._records.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
        self._records.flush()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Append one point to the curve of each name."""
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step, summary=Summary(value=points))

    def close(self) -> None:
        """Close the file."""
        self._records.close()


class Trackio:
    """track=trackio: a local SQLite store, `~/.cache/huggingface/trackio` or $TRACKIO_DIR.

    `trackio list runs --project P` and `trackio get metric --project P --run R --metric train/loss` read it. Trackio
    writes from a thread of its own, which warns of its failures and raises none. A run that starts afresh under a used
    name is a second run of that name, and commands mean the newest.
    """

    def __init__(self, project: str, run_name: str, config: dict[str, Any], step: int):
        """Start the run, or, if it has made steps before, go on with the one of that name."""
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._finish, self._storage = trackio.finish, SQLiteStorage
        self._run = trackio.init(project, run_name, config=config, resume="allow" if step else "never")
        self._recorded = SQLiteStorage.get_max_step_for_run(project, run_name, run_id=self._run.id) or 0

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record the values, save those that are there: a resumed run repeats the steps after its checkpoint."""
        if step <= self._recorded:
            there, run = self._storage.get_metric_values, self._run
            taken = {name for name in values if there(run.project, run.name, name, step=step, run_id=run.id)}
            values = {name: value for name, value in values.items() if name not in taken}
        if values:
            self._run.log(values, step=step)

    def close(self) -> None:
        """Wait until trackio has written everything."""
        self._finish()


Backend = Trackio | EventFile | None
TRACKER_BACKENDS: dict[str, Callable[..., Backend]] = {
    "none": lambda **_: None,
    "trackio": lambda run, **given: Trackio(**given),
    "tensorboard": lambda run, step, **_: EventFile(run / "tensorboard", step),
}
TRACKERS = tuple(TRACKER_BACKENDS)
PACKAGES = {"trackio": "trackio", "tensorboard": "tensorboardX"}


class Tracker:
    """A backend whose failures cost its numbers and not the training; without one nothing is recorded."""

    def __init__(self, name: str, backend: Backend):
        """Wrap an open backend."""
        self._name, self._backend = name, backend

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record values such as `train/loss` at an optimizer step; never raises.

        At the first failure it says so on stderr, once, and records nothing from then on: a half-written record may
        hide what follows, and metrics.jsonl has everything.
        """
        self._attempt(lambda backend: backend.log(step, values))

    def close(self) -> None:
        """Write out what is pending; never raises."""
        self._attempt(lambda backend: backend.close())
        self._backend = None

    def _attempt(self, act: Callable[[Trackio | EventFile], None]) -> None:
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
    try:
        if name in PACKAGES:
            importlib.import_module(PACKAGES[name])
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"track={name}: {error.name} is not installed; {how_to_install('track')}, or use track=none"
        ) from None


def open_tracker(
    name: str, *, project: str, run_name: str, run: Path, config: dict[str, Any], step: int = 0
) -> Tracker:
    """A tracker for a training run.

    Args:
        name: none; trackio; or tensorboard, whose event files go to run/tensorboard.
        project: the group of runs, for trackio.
        run_name: the run in its group, for trackio.
        run: the run's folder.
        config: settings shown by trackio; config.json in the run's folder has it too.
        step: number of optimizer steps that the run has made. Above 0 it goes on with its earlier curves:
            tensorboard replaces what they have of later steps; trackio cannot, leaves it and takes no second value.

    Raises:
        ConfigError: for an unknown name, a tracker that is not installed, or one that cannot be opened.

    """
    check_tracker(name)
    try:
        return Tracker(
            name, TRACKER_BACKENDS[name](project=project, run_name=run_name, run=run, config=config, step=step)
        )
    except Exception as error:  # trackio raises SQLite's errors, too
        raise ConfigError(f"track={name}: cannot be opened: {error}; repair that, or use track=none") from None
