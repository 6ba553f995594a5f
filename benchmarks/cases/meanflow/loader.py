"""`python -m benchmarks meanflow-loader`: records per second that the loader alone brings to the device.

Three sets have sizes as in training: 60,000 grey pictures of 32x32 in memory; JPEGs of 256x256, cut from
scikit-learn's two photographs, in a folder; and 8 x 32 x 32 moments in half precision in shards. Each row takes batches
from an endless stream, so that workers read ahead as they do in training. Files were just written, so that decoding
and moving are measured, not a disk.
"""

import collections
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.table import Table
from sklearn.datasets import load_sample_images

from benchmarks.cases.meanflow.options import LoaderOptions, counts
from benchmarks.harness.budget import say
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row, at
from benchmarks.harness.table import finish, result_table
from fullstride.device.select import cores, resolve_device
from fullstride.errors import ConfigError
from fullstride.meanflow.data.dataset import Split
from fullstride.meanflow.data.latents import latents
from fullstride.meanflow.data.loader import Loader
from fullstride.meanflow.data.order import epoch_order
from fullstride.meanflow.data.reader import PREFETCH
from fullstride.meanflow.data.shards import write_latents
from fullstride.meanflow.data.sources.image_folder import image_folder
from fullstride.measure.gate import require_close
from fullstride.measure.roofline import Ceilings, RooflineBound, measure_ceilings
from fullstride.measure.timing import Clock, HostClock, TimingPlan, clock_for, measure

RECORDS = {"memory": 60_000, "pictures": 2_000, "latents": 10_000}


def write_photographs(folder: Path, count: int, size: int = 256) -> None:
    """Write JPEGs cut out of two photographs at random; random pixels would take far longer to decode."""
    rng = np.random.default_rng(0)
    photographs = load_sample_images().images
    folder.mkdir(parents=True)
    for i in range(count):
        whole = photographs[i % len(photographs)]
        top, left = (int(rng.integers(0, n - size + 1)) for n in whole.shape[:2])
        cut = Image.fromarray(whole[top : top + size, left : left + size])
        cut.save(folder / f"{i:06d}.jpg", quality=90)


def _memory(_: Path, count: int) -> Split:
    return Split(torch.randint(0, 256, (count, 1, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (count,)))


def _pictures(folder: Path, count: int) -> Split:
    for name, records in (("train", count), ("test", 1)):
        write_photographs(folder / name, records)
    return image_folder(folder).train


def _latents(folder: Path, count: int) -> Split:
    for name, records in (("train", count), ("test", 1)):
        labels = torch.arange(records) % 1000
        write_latents(folder / name, torch.randn(records, 8, 32, 32).half(), labels)
    return latents(folder).train


SETS: dict[str, Callable[[Path, int], Split]] = {"memory": _memory, "pictures": _pictures, "latents": _latents}


@dataclass(frozen=True)
class LoaderBench:
    """Settings that all rows share; `host` holds the rates of the CPU's memory."""

    device: torch.device
    batch_size: int
    clock: Clock
    ceilings: Ceilings
    host: Ceilings

    def row(self, name: str, split: Split, workers: int, decode_ms: float) -> tuple[Row, float]:
        """Check, then time a set; return the row and the check's error."""
        if not (whole := len(split) // self.batch_size):
            raise ConfigError(f"batch_size={self.batch_size}: expected at most {len(split)}, the records of a set")
        sizes = {"steps": whole, "micro_batches": 1, "batch_size": self.batch_size, "seed": 0}
        orders = [epoch_order(len(split), **sizes, epoch=epoch) for epoch in range(2)]
        steps = steps_a_call(whole, workers)
        title = name if split.in_memory else f"{name}, {workers} workers"
        say(f"timing: {title}")
        with Loader(split, self.device, workers) as loader:
            stream = loader.batches(itertools.cycle(orders))
            error = require_close(name, next(stream).raw[0], split.read(orders[0][0, 0]), tolerance=0.0)
            plan = TimingPlan(warmup=1, repeats=5, seconds=1.0)
            timing = measure(lambda: collections.deque(itertools.islice(stream, steps), maxlen=0), self.clock, plan)
        taken = steps * self.batch_size
        extra = {"workers": workers, "records_per_second": taken / timing.median_ms * 1e3}
        extra |= {"record_bytes": _bytes(split), "decode_ms": decode_ms}
        return Row(title, timing, self._floor(split, taken, workers, decode_ms), extra), error

    def _floor(self, split: Split, taken: int, workers: int, decode_ms: float) -> RooflineBound:
        """Return the roofline bound: each byte read and written once where it is gathered, and its decoding."""
        rate = self.ceilings.bytes if split.in_memory else self.host.bytes
        at_once = min(max(workers, 1), cores())
        return RooflineBound(taken * decode_ms / at_once, 2 * taken * _bytes(split) / rate * 1e3)

    def rows(self, counts: list[int]) -> tuple[list[Row], dict[str, float]]:
        """Return the rows of all sets and the check's error of each."""
        rows, errors = [], {}
        with tempfile.TemporaryDirectory() as folder:
            for name, make in SETS.items():
                split = make(Path(folder) / name, RECORDS[name])
                decode_ms = _decode_ms(split) if name == "pictures" else 0.0
                for workers in [0] if split.in_memory else counts:
                    row, errors[name] = self.row(name, split, workers, decode_ms)
                    rows.append(row)
        return rows, errors


def _bytes(split: Split) -> int:
    return split.read(torch.zeros(1, dtype=torch.long)).nbytes


def _decode_ms(split: Split, count: int = 64) -> float:
    """Return the milliseconds that one core takes to read and decode an image."""
    chosen = torch.arange(min(count, len(split)))
    return measure(lambda: split.read(chosen), HostClock(), TimingPlan(warmup=1, repeats=5)).median_ms / len(chosen)


def steps_a_call(least: int, workers: int) -> int:
    """Return steps per call: whole rounds of the workers, and enough that prefetched batches do not count."""
    if not workers:
        return least
    rounds = max(4 * PREFETCH, math.ceil(least / workers))
    return rounds * workers


def worker_counts(most: int) -> list[int]:
    """Return 0, the powers of two below `most`, and `most`."""
    return sorted({0, *counts(most)})


def run(options: LoaderOptions, out: Path) -> Path:
    """Check, measure, print the table and write the JSON; return its path.

    ConfigError if the device is not there, or a set has fewer records than a batch. GateError if a batch is not what
    was asked for.
    """
    chosen, batch_size, workers = resolve_device(options.device), options.batch_size, options.workers
    torch.manual_seed(0)
    ceilings = measure_ceilings(chosen.type)
    host = ceilings if chosen.type == "cpu" else measure_ceilings("cpu")
    bench = LoaderBench(chosen, batch_size, clock_for(chosen.type), ceilings, host)
    rows, errors = bench.rows(worker_counts(cores() if workers is None else workers))
    conditions = {
        "batch_size": batch_size,
        "records": RECORDS,
        "host_copy_bytes_per_second": int(host.bytes),
        **at(batch=(batch_size, LoaderOptions.batch_size), workers=(workers, None)),
    }
    result = CaseResult("meanflow-loader", chosen.type, conditions, errors, ceilings, rows, environment())

    def shown() -> Iterator[Table | str]:
        yield result_table(result)
        yield from (f"{row.name}: {row.extra['records_per_second']:,.0f} records/s" for row in rows)

    return finish(result, out, shown, width=0)
