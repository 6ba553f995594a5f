"""`python -m benchmarks train-soak`: short trainings one after the other in one process, and what drifts meanwhile.

Each is a whole run of the smallest kind: its data, its network, some steps, a checkpoint. All are of one seed, so that
each has to end as the first one did.
"""

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.cases.trainings.options import TrainSoakOptions
from benchmarks.harness.budget import say
from benchmarks.harness.drift import drifts, held
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row, write_result
from benchmarks.harness.table import console_of, result_table
from fullstride.device.select import resolve_device
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import RooflineBound, measure_ceilings, roofline_bound
from fullstride.measure.timing import Timing
from fullstride.runs.folder import numbered, read_metrics

PARTS, WHOLE, WIDTH = 20, "whole", 100
ROUNDING = 1e-3  # of a loss, from one training to the next on a GPU, whose sums have no order
MEANFLOW = (
    "data=digits", "model=unet", "model.channels=4", "model.channel_mult=[1,2]", "model.num_blocks=1",
    "model.attention_resolutions=[]", "data.batch_size=256", "data.workers=0", "epochs=1", "log_every=1",
    "guard.check_tangents=false",
)  # fmt: skip
BERT = ("steps=4", "log_every=1", "optimizer.warmup_steps=2", "data.batch_size=4", "eval_every=0")


def _meanflow(folder: str) -> Path:
    from fullstride.meanflow.config.overrides import compose
    from fullstride.meanflow.training.trainer import train

    return train(compose([*MEANFLOW, f"output_dir={folder}", "overwrite=true"]))


def _bert(folder: str) -> Path:
    from fullstride.bert.training.settings import settings_of
    from fullstride.bert.training.trainer import train

    return train(settings_of([*BERT, f"output_dir={folder}", "overwrite=true"]))


TRAININGS: dict[str, Callable[[str], Path]] = {"meanflow": _meanflow, "bert": _bert}


def run(options: TrainSoakOptions, out: Path) -> Path:
    """Train again and again, a row for each part of the trainings, written as it is found; return the result's path.

    GateError if a training ends with another loss than the first one.
    """
    train, parts = TRAININGS[options.workload], min(PARTS, options.runs)
    device = resolve_device("auto").type
    ceilings, rows, losses, began = measure_ceilings(device), list[Row](), list[float](), time.perf_counter()
    conditions = {"section": options.workload, "runs": options.runs}
    result = CaseResult("train-soak", device, conditions, {}, ceilings, rows, environment())
    with tempfile.TemporaryDirectory() as folder:
        for part in range(parts):
            count = options.runs * (part + 1) // parts - options.runs * part // parts
            times = [_timed(train, folder, losses, device) for _ in range(count)]
            hours = (time.perf_counter() - began) / 3600
            extra = {"hours": hours, "trainings": len(losses), **held()}
            # No training is faster than reading what a checkpoint of it has.
            size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            rows.append(Row(f"after {len(losses)}", _timing(times), roofline_bound(0, size, ceilings), extra))
            say(f"after {len(losses)} trainings: {times[-1] / 1e3:.3g} s each, {extra['resident_bytes'] / 1e6:.1f} MB")
            write_result(result, out)
    result.gate["largest difference of a loss from the first training's"] = max(abs(x - losses[0]) for x in losses)
    rows.append(_whole(rows, rows[-1].floor))
    console_of(WIDTH).print(result_table(result))
    return write_result(result, out)


def _timed(train: Callable[[str], Path], folder: str, losses: list[float], device: str) -> float:
    started = time.perf_counter()
    lines = numbered(read_metrics(train(folder)), "loss")
    milliseconds = 1e3 * (time.perf_counter() - started)
    losses.append(float(lines[-1]["loss"]))
    if not math.isclose(losses[-1], losses[0], rel_tol=0 if device == "cpu" else ROUNDING):
        raise GateError(f"training {len(losses)} ended with a loss of {losses[-1]!r}, the first one with {losses[0]!r}")
    return milliseconds


def _timing(times: list[float]) -> Timing:
    return Timing(times[0], tuple(times), None)


def _whole(rows: list[Row], least: RooflineBound) -> Row:
    """Row of all trainings, with the drift of what they leave in the process."""
    series: dict[str, list[float]] = {name: [row.extra[name] for row in rows] for name in held()}
    series["median_ms"] = [row.timing.median_ms for row in rows]
    found = drifts([row.extra["hours"] for row in rows], series)
    for name, drift in found.items():
        say(f"{name}: {drift['per_hour']:+.4g} an hour, {drift['growth']:+.2%} over the time")
    times = [sample for row in rows for sample in row.timing.samples_ms]
    return Row(WHOLE, _timing(times), least, {"drift": found})
