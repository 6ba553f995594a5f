"""Result of the comparison of quality against time: by minute, at the end, and the claims made beforehand."""

import base64
import io
import math

import numpy as np
from PIL import Image

from benchmarks.experiments.meanflow.phase_rows import PIXELS, unlike
from benchmarks.experiments.meanflow.race_asked import DECLARED, RaceRequest
from benchmarks.experiments.meanflow.race_claims import (
    CLOCKS,
    SOLVER,
    Place,
    Records,
    comparable,
    completed,
    judged,
    line,
    over_seeds,
    places,
    read_records,
)
from benchmarks.experiments.meanflow.record import MARKS
from benchmarks.experiments.meanflow.watch import MOMENTS, SHOWN
from benchmarks.harness.run_provenance import of_runs
from benchmarks.harness.seeds import (
    Curve,
    ExperimentResult,
    NothingFinished,
    Outcome,
    PartResult,
    Picture,
    seeds_in_words,
)
from fullstride.meanflow.config.networks import SongUNetConfig


def gather(asked: RaceRequest, seeds: tuple[int, ...]) -> ExperimentResult:
    """Return the result of all runs that have begun.

    NothingFinished if none has reached its first mark. ConfigError if they are of different machines or settings.
    """
    found = {code: read_records(asked, code, seeds) for code in asked.codes}
    found = {code: records for code, records in found.items() if records}
    if not found:
        raise NothingFinished(f"{asked.folder}: found no run that reached a mark; run some without --collect first")
    config = asked.config("fullstride", 0)
    assert isinstance(config.model, SongUNetConfig)
    metrics, apart = _metrics(found)
    complete = {code: completed(records) for code, records in found.items()}
    return ExperimentResult(
        "time-to-quality" + "-annealed" * asked.decays,
        "Quality against time, beside the official code" + ", with a rate that falls" * asked.decays,
        DECLARED["about"] + DECLARED["about_decayed"] * asked.decays,
        asked.scale,
        config.device,
        {
            "minutes": asked.minutes,
            "seeds": list(seeds),
            "data": config.data.name,
            "network": config.model.name,
            "batch": config.data.batch_size,
        }
        | {"learning rate": config.optimizer.lr, "average": config.ema.decays[0], "dropout": config.model.dropout}
        | {"samples": config.evaluation.num_samples, "overrides": list(asked.overrides)},
        [_by_minute(found, metrics), _at_the_end(complete, metrics)],
        of_runs((record for records in found.values() for record in records.values()), config.device),
        claims=judged(complete, asked.minutes, metrics, decays=asked.decays),
        curves=[curve for metric in metrics for curve in _curves(found, metric)],
        pictures=[shown for code, records in found.items() if (shown := _picture(code, records)) is not None],
        missing=[*apart, *_missing(asked.codes, found, seeds)],
    )


def _metrics(found: dict[str, Records]) -> tuple[list[str], list[str]]:
    """Return the distances that can be compared, and the reasons for others."""
    first = next(iter(next(iter(found.values())).values()))["marks"][0]["scores"]
    names = [name for name in first if name == PIXELS or name.startswith("F")]
    every = [item for records in found.values() for item in records.items()]
    why = unlike((seed, {name: record["floor"][name] for name in names}) for seed, record in every)
    return [name for name in names if name not in why], [*why.values()]


def _missing(codes: tuple[str, ...], found: dict[str, Records], seeds: tuple[int, ...]) -> list[str]:
    missing = []
    for code in codes:
        records = found.get(code, {})
        if not_there := [seed for seed in seeds if seed not in records]:
            missing.append(f"{code}, {seeds_in_words(not_there)}: no mark")
        for seed, record in records.items():
            if len(record["marks"]) < MARKS:
                missing.append(f"{code}, seed {seed}: {len(record['marks'])} of {MARKS} marks")
            elif code != "official" and SOLVER not in record["final"]:
                missing.append(f"{code}, seed {seed}: the solver's score")
    return missing


def _name(at: Place) -> str:
    kind, i = at
    return str(i + 1) if kind == "marks" else f"{MOMENTS[i]:.0%} of the time with start-up"


def _by_minute(found: dict[str, Records], metrics: list[str]) -> PartResult:
    rows = []
    for code, records in found.items():
        for at in places(records, max):
            values = {name: over_seeds(records, at, lambda m, n=name: m["scores"][n]) for name in metrics}
            clocks = {text: over_seeds(records, at, lambda m, n=name: m[n]) for name, text in CLOCKS.items()}
            steps = over_seeds(records, at, lambda m: m["step"])
            rows.append(Outcome({"code": code, "mark": _name(at)}, clocks | {"steps": steps} | values, [code]))
    question = "How good are one-step samples after each tenth of the time?"
    return PartResult("by-minute", "One-step samples by time", question, rows)


def _at_the_end(complete: dict[str, Records], metrics: list[str]) -> PartResult:
    rows = []
    for code, records in complete.items():
        last = {name: over_seeds(records, ("marks", MARKS - 1), lambda m, n=name: m["scores"][n]) for name in metrics}
        rows += [Outcome({"code": code, "sampler": "meanflow 1"}, last, [code])] if records else []
        for sampler in dict.fromkeys(name for record in records.values() for name in record["final"]):
            scored = {seed: record["final"][sampler] for seed, record in records.items() if sampler in record["final"]}
            values = {name: {seed: scores[name] for seed, scores in scored.items()} for name in metrics}
            rows.append(Outcome({"code": code, "sampler": sampler}, values, [code]))
    if rows:
        floors = {seed: record["floor"] for records in complete.values() for seed, record in records.items()}
        values = {name: {seed: floor[name] for seed, floor in floors.items()} for name in metrics}
        rows.append(Outcome({"code": "floor: as many training images", "sampler": ""}, values))
    return PartResult("end", "At the end of the time", "How far is one step from the solver of the same weights?", rows)


def _curves(found: dict[str, Records], metric: str) -> list[Curve]:
    curves = []
    for clock, text in CLOCKS.items():
        chosen = {code: comparable(records) for code, records in found.items()}
        series = {code: line(records, metric, clock) for code, records in chosen.items()}
        name = f"{metric}-{clock}".lower().replace(" ", "-")
        means = "; ".join(f"{code} over {seeds_in_words(records)}" for code, records in chosen.items())
        caption = f"{metric} of one-step samples to held-out images by {text}. Means: {means}."
        curves.append(Curve(name, caption, text, f"{metric} (log)", series))
    return curves


def _picture(code: str, records: Records) -> Picture | None:
    """Return an image with a row per mark, of the first seed with most marks; columns share their noise."""
    seed = max(records, key=lambda seed: (len(records[seed]["marks"]), -seed))
    marks = records[seed]["marks"]
    channels = marks[0].get("channels", 1)  # grey where a record is older than colours
    if channels not in (1, 3):
        return None
    rows = [np.frombuffer(base64.b64decode(mark["shown"]), np.uint8) for mark in marks]
    side = math.isqrt(len(rows[0]) // SHOWN // channels)
    tiles = np.stack(rows).reshape(len(rows), SHOWN, channels, side, side)
    pixels = tiles.transpose(0, 3, 1, 4, 2).reshape(len(rows) * side, SHOWN * side, channels)
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels).save(buffer, "PNG")
    caption = f"One-step samples of {code}, seed {seed}, by minutes of training; one noise in a column."
    minutes = [f"{mark['seconds'] / 60:.1f}" for mark in records[seed]["marks"]]
    return Picture(f"samples-{code}", caption, base64.b64encode(buffer.getvalue()).decode(), minutes)
