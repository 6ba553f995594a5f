"""TensorBoard's event files, through tensorboardX's encoder.

Its `SummaryWriter` writes from a thread: if that dies, as on a full disk, its bounded queue blocks the training for
ever. Here a full disk is an error of the step that met it.
"""

import time
from pathlib import Path
from typing import Any

from fullstride.runs.trackers.tracked_run import TrackedRun

VERSION = "brain.Event:2"


def open_events(run: TrackedRun) -> "EventFile":
    """Open a new event file in `tensorboard` of the run's folder."""
    return EventFile(run.folder / "tensorboard", run.step)


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

    def close(self, state: str = "finished") -> None:
        """Close the file; TensorBoard shows no state."""
        self._records.close()
