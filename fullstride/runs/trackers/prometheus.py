"""Prometheus, by a file for node exporter's textfile collector.

A file and no port: runs of one machine do not get in each other's way, and a run's end can still be read after it.
"""

import os
import time
from pathlib import Path

from fullstride.runs.state import STATES
from fullstride.runs.trackers.tracked_run import TrackedRun

PREFIX = "fullstride_train_"
# Each number that is written, by the names that workloads give it, with its help.
NUMBERS = {
    "loss": (("train/loss",), "Loss, as metrics.jsonl has it."),
    "squared_error": (("train/squared_error",), "Squared error of MeanFlow's regression, unweighted."),
    "step_seconds": (("train/seconds_per_step",), "Seconds of an optimizer step."),
    "samples_per_second": (
        ("train/images_per_second", "train/rows_per_second"),
        "Images, or rows of text, that are trained on in a second.",
    ),
    "device_memory_bytes": (("train/device_memory_bytes",), "Largest memory of the device so far."),
}


class PrometheusFile:
    """track=prometheus: `prometheus/train.prom` in the run's folder, replaced with each line of metrics.jsonl."""

    def __init__(self, run: TrackedRun):
        """Write the file for a run that has made `run.step` steps."""
        from prometheus_client import CollectorRegistry, Gauge

        self.path, self._registry = run.folder / "prometheus" / "train.prom", CollectorRegistry()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        labels = {"project": run.project, "run": run.name, "folder": str(run.folder.absolute())}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(PREFIX + name, text, [*labels], registry=self._registry)

        self._numbers = {name: gauge(name, text) for name, (_, text) in NUMBERS.items()}
        self._state = Gauge(PREFIX + "state", "1 for the state.", [*labels, "state"], registry=self._registry)
        self._labels = labels
        self._memory = gauge("resident_memory_bytes", "Memory of the process.").labels(**labels)
        self._updated = gauge("updated_seconds", "Time of these numbers, since 1970.").labels(**labels)
        self._step = gauge("step", "Optimizer steps made.").labels(**labels)
        gauge("steps", "Optimizer steps of the whole run.").labels(**labels).set(run.steps)
        self._step.set(run.step)
        self._write("running")

    def _write(self, state: str) -> None:
        from prometheus_client import write_to_textfile

        for each in STATES:
            self._state.labels(**self._labels, state=each).set(each == state)
        self._memory.set(_resident())
        self._updated.set(time.time())
        write_to_textfile(str(self.path), self._registry)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Replace the numbers that are there."""
        self._step.set(step)
        for name, (sources, _) in NUMBERS.items():
            for value in (values[source] for source in sources if source in values):
                self._numbers[name].labels(**self._labels).set(value)
        self._write("running")

    def close(self, state: str = "finished") -> None:
        """Write how the run ended."""
        self._write(state)


def _resident() -> float:
    """Bytes of memory that this process holds."""
    return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
