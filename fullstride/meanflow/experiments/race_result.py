"""What the comparison of quality against time found: by minute, at the end, and what was claimed beforehand."""

import base64
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fullstride.bench.environment import environment
from fullstride.bench.experiments import Claim, Curve, ExperimentResult, Outcome, PartResult, Picture, mean
from fullstride.errors import ConfigError
from fullstride.meanflow.config import SongUNetConfig
from fullstride.meanflow.experiments.jobs import name_of
from fullstride.meanflow.experiments.race import CODES, EULER, Asked
from fullstride.meanflow.experiments.watch import MARKS, MOMENTS, RECORD, SHOWN

# By seed.
Records = dict[int, dict[str, Any]]
# `marks` or `moments` of a record, and which of them.
Place = tuple[str, int]
CLOCKS = {"seconds": "seconds of training", "with start-up": "seconds with start-up"}
# Of the official code's time, in which fullstride is to reach its quality.
SHARE = MOMENTS[0]
SOLVER = name_of(EULER)
# One step's distance over 50 Euler steps'.
WITHIN = 1.1
# Up to this share floors differ by the rounding of another device; another classifier's differ by more.
SAME_FLOOR = 1e-3
ABOUT = (
    "The official PyTorch code and fullstride train the same network by the same recipe on Fashion-MNIST, padded to "
    "32x32, on one GPU each, for the same time. The official code computes in TF32 and is given batches that lie on "
    "the device already; fullstride computes in bf16. One-step samples of the averaged weights are scored at every "
    "tenth of the time, and where 40 % and all of it are over with start-up included; the clock stands meanwhile. "
    "Start-up is everything until a process has made five steps: building, compiling, checking, recording. "
    "Fashion-MNIST is grey and easy and stands in for no other data."
)


def gather(asked: Asked, seeds: tuple[int, ...]) -> ExperimentResult:
    """The result of all runs that have begun.

    Raises:
        ConfigError: if none has reached its first mark.

    """
    found = {code: _records(asked.folder, code, seeds) for code in CODES}
    found = {code: records for code, records in found.items() if records}
    if not found:
        raise ConfigError(f"{asked.folder}: no run there that reached a mark; run some without --collect")
    config = asked.config("fullstride", 0)
    assert isinstance(config.model, SongUNetConfig)
    metrics, apart = _metrics(found)
    complete = {code: _complete(records) for code, records in found.items()}
    return ExperimentResult(
        "time-to-quality",
        "Quality against time, beside the official code",
        ABOUT,
        asked.scale,
        config.device,
        {
            "minutes": asked.minutes,
            "data": config.data.name,
            "network": config.model.name,
            "batch": config.data.batch_size,
        }
        | {"learning rate": config.optimizer.lr, "average": config.ema.decays[0], "dropout": config.model.dropout}
        | {"samples": config.evaluation.num_samples, "overrides": list(asked.overrides)},
        [_by_minute(found, metrics), _at_the_end(complete, metrics)],
        environment(record.get("code", {}) for records in found.values() for record in records.values()),
        claims=_claims(complete, asked.minutes, metrics),
        curves=[curve for metric in metrics for curve in _curves(found, metric)],
        pictures=[_picture(code, records) for code, records in found.items()],
        missing=[*apart, *_missing(found, seeds)],
    )


def _records(folder: Path, code: str, seeds: tuple[int, ...]) -> Records:
    paths = {seed: folder / f"{code}-{seed}" / RECORD for seed in seeds}
    records = {seed: {"moments": []} | json.loads(path.read_text()) for seed, path in paths.items() if path.is_file()}
    return {seed: record for seed, record in records.items() if record["marks"]}


def _complete(records: Records) -> Records:
    return {seed: record for seed, record in records.items() if len(record["marks"]) >= MARKS}


def _metrics(found: dict[str, Records]) -> tuple[list[str], list[str]]:
    """The distances that every mark has and that compare, and why others do not."""
    first = next(iter(next(iter(found.values())).values()))["marks"][0]["scores"]
    compared, apart = [], []
    for name in (name for name in first if name == "energy distance" or name.startswith("F")):
        floors = [record["floor"][name] for records in found.values() for record in records.values()]
        if max(floors) - min(floors) <= SAME_FLOOR * max(floors):
            compared.append(name)
            continue
        apart.append(
            f"{name}: the same images score {min(floors):.4g} to {max(floors):.4g} in different runs, which had "
            "different classifiers; give all runs one $FULLSTRIDE_CACHE/reference"
        )
    return compared, apart


def _missing(found: dict[str, Records], seeds: tuple[int, ...]) -> list[str]:
    missing = []
    for code in CODES:
        for seed in seeds:
            record = found.get(code, {}).get(seed)
            if record is None or len(record["marks"]) < MARKS:
                missing.append(f"{code}, seed {seed}: {len(record['marks']) if record else 0} of {MARKS} marks")
            elif code == "fullstride" and SOLVER not in record["final"]:
                missing.append(f"{code}, seed {seed}: the solver's score")
    return missing


def _over_seeds(records: Records, at: Place, value: Callable[[dict[str, Any]], float]) -> dict[int, float]:
    """A number of a mark or a moment, by seed."""
    kind, i = at
    return {seed: float(value(record[kind][i])) for seed, record in records.items() if i < len(record[kind])}


def _places(records: Records, has: Callable[[Iterable[int]], int]) -> list[Place]:
    """The marks and the moments that `has`, any or all, of the seeds have reached."""
    return [(kind, i) for kind in ("marks", "moments") for i in range(has(len(r[kind]) for r in records.values()))]


def _name(at: Place) -> str:
    kind, i = at
    return str(i + 1) if kind == "marks" else f"{MOMENTS[i]:.0%} of the time with start-up"


def _by_minute(found: dict[str, Records], metrics: list[str]) -> PartResult:
    rows = []
    for code, records in found.items():
        for at in _places(records, max):
            values = {name: _over_seeds(records, at, lambda m, n=name: m["scores"][n]) for name in metrics}
            clocks = {text: _over_seeds(records, at, lambda m, n=name: m[n]) for name, text in CLOCKS.items()}
            steps = _over_seeds(records, at, lambda m: m["step"])
            rows.append(Outcome({"code": code, "mark": _name(at)}, clocks | {"steps": steps} | values, [code]))
    question = "How good are one-step samples after each tenth of the time?"
    return PartResult("by-minute", "One-step samples by time", question, rows)


def _at_the_end(complete: dict[str, Records], metrics: list[str]) -> PartResult:
    rows = []
    for code, records in complete.items():
        last = {name: _over_seeds(records, ("marks", MARKS - 1), lambda m, n=name: m["scores"][n]) for name in metrics}
        rows += [Outcome({"code": code, "sampler": "meanflow 1"}, last, [code])] if records else []
        for sampler in dict.fromkeys(name for record in records.values() for name in record["final"]):
            scored = {seed: record["final"][sampler] for seed, record in records.items() if sampler in record["final"]}
            values = {name: {seed: scores[name] for seed, scores in scored.items()} for name in metrics}
            rows.append(Outcome({"code": code, "sampler": sampler}, values, [code]))
    if rows:
        floor = next(record["floor"] for records in complete.values() for record in records.values())
        values = {name: {0: floor[name]} for name in metrics}
        rows.append(Outcome({"code": "floor: as many training images", "sampler": ""}, values))
    return PartResult("end", "At the end of the time", "How far is one step from the solver of the same weights?", rows)


def _curves(found: dict[str, Records], metric: str) -> list[Curve]:
    curves = []
    for clock, text in CLOCKS.items():
        series = {code: _line(records, metric, clock) for code, records in found.items()}
        name = f"{metric}-{clock}".lower().replace(" ", "-")
        caption = f"{metric} of one-step samples to held-out images by {text}; mean over seeds."
        curves.append(Curve(name, caption, text, f"{metric} (log)", series))
    return curves


def _line(records: Records, metric: str, clock: str) -> list[tuple[float, float]]:
    """Mean over seeds at each mark and moment that all of them have, by time."""
    points = []
    for at in _places(records, min):
        x = _over_seeds(records, at, lambda m: m[clock])
        y = _over_seeds(records, at, lambda m: m["scores"][metric])
        points.append((mean(list(x.values())), mean(list(y.values()))))
    return sorted(points)


def _claims(complete: dict[str, Records], minutes: float, metrics: list[str]) -> list[Claim]:
    """Judged on means over seeds, each code's own complete runs."""
    found = []
    ours, theirs = complete.get("fullstride", {}), complete.get("official", {})
    for metric in metrics:
        for clock, text in CLOCKS.items():
            found.append(_reached(ours, theirs, metric, clock, text, minutes))
    return [*found, *(_near_the_solver(ours, metric) for metric in metrics)]


def _reached(ours: Records, theirs: Records, metric: str, clock: str, text: str, minutes: float) -> Claim:
    budget = 60 * minutes
    claim = f"{metric} of the official code after {budget:g} {text} is reached in at most {SHARE * budget:g}"
    if not (ours and theirs):
        return Claim(claim, "not run", None)
    within = [y for x, y in _line(theirs, metric, clock) if x <= budget * 1.01]
    if not within:
        return Claim(claim, f"the official code has no mark within {budget:g} {text}", None)
    target = within[-1]
    reached = next((x for x, y in _line(ours, metric, clock) if y <= target), None)
    if reached is None:
        return Claim(claim, f"{target:.4g} is not reached", False)
    return Claim(claim, f"{target:.4g} is reached after {reached:.0f} s", reached <= SHARE * budget * 1.01)


def _near_the_solver(ours: Records, metric: str) -> Claim:
    claim = f"{metric} of one step is at most {WITHIN:g} x that of 50 Euler steps of the same weights"
    pairs = [
        (record["marks"][MARKS - 1]["scores"][metric], record["final"][SOLVER][metric])
        for record in ours.values()
        if SOLVER in record["final"]
    ]
    if not pairs:
        return Claim(claim, "not run", None)
    one, solver = (mean(list(values)) for values in zip(*pairs, strict=True))
    return Claim(claim, f"{one:.4g} / {solver:.4g} = {one / solver:.2f}", one <= WITHIN * solver)


def _picture(code: str, records: Records) -> Picture:
    """A row a mark, of the first seed that has most of them; the same noise in a column."""
    seed = max(records, key=lambda seed: (len(records[seed]["marks"]), -seed))
    rows = [np.frombuffer(base64.b64decode(mark["shown"]), np.uint8) for mark in records[seed]["marks"]]
    side = int((len(rows[0]) // SHOWN) ** 0.5)
    tiles = np.stack(rows).reshape(len(rows), SHOWN, side, side)
    pixels = tiles.transpose(0, 2, 1, 3).reshape(len(rows) * side, SHOWN * side)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    caption = f"One-step samples of {code}, seed {seed}: a row for each tenth of the time, one noise in a column."
    return Picture(f"samples-{code}", caption, base64.b64encode(buffer.getvalue()).decode())
