"""Watch for activity on a GPU: asks the driver at intervals, in a thread of its own since the driver may hang."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fullstride.runs.atomic_files import note

if TYPE_CHECKING:
    import torch

EVERY, STALE = 5.0, 20.0  # seconds between queries; seconds after which an answer is stale


def utilization_probes(device: "torch.device") -> list[Callable[[], int]]:
    """Return functions that give the GPU's recent utilisation in percent."""
    import torch

    index = device.index or 0
    identity = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    ways: list[Callable[[], int]] = [lambda: torch.cuda.utilization(index)]
    if tool := shutil.which("nvidia-smi"):
        command = [tool, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", identity]
        given: Any = {"capture_output": True, "text": True, "timeout": STALE, "check": True}
        ways.append(lambda: int(subprocess.run(command, **given).stdout))
    return ways


def _answer(way: Callable[[], int]) -> int | None:
    try:
        return way()
    except Exception:  # each driver and package fails in ways of its own, and none is the training's concern
        return None


class GpuActivity:
    """Poll the GPU until the context ends; if no probe works, say so once and answer None."""

    def __init__(self, ways: list[Callable[[], int]], every: float = EVERY):
        """Take the first of `ways` that answers.

        Args:
            ways: probes (see `utilization_probes`); each returns percent, or raises.
            every: seconds between two queries.

        """
        self._way, self._every = next((way for way in ways if _answer(way) is not None), None), every
        self._found, self._time = False, -STALE
        self._ended = threading.Event()
        if ways and self._way is None:
            note("GPU activity is not watched; pip install nvidia-ml-py, or put nvidia-smi on PATH")

    def busy(self) -> bool | None:
        """Return whether a kernel ran at the last query; None if unknown."""
        return self._found if time.monotonic() - self._time < STALE else None

    def _keep_asking(self, way: Callable[[], int]) -> None:
        while not self._ended.is_set():
            if (answer := _answer(way)) is not None:
                self._found, self._time = answer > 0, time.monotonic()
            self._ended.wait(self._every)

    def __enter__(self) -> "GpuActivity":
        if self._way:
            threading.Thread(target=self._keep_asking, args=(self._way,), name="gpu_use", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop polling; a query that hangs is not waited for."""
        self._ended.set()
