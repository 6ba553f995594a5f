"""Results of the BERT experiment's runs, and what calling their step cost, in one file."""

import statistics
from typing import Any

import numpy as np

from benchmarks.experiments.bert.experiment import DECLARED, NOMINAL, BertRequest, device_of, read_begun
from benchmarks.harness.run_provenance import of_runs
from benchmarks.harness.seeds import Curve, ExperimentResult, NothingFinished, Outcome, PartResult
from fullstride.errors import ConfigError
from fullstride.measure.roofline import Ceilings
from fullstride.runs.folder import read_metrics


def gather(asked: BertRequest) -> ExperimentResult:
    """Return the result of all runs that have begun.

    NothingFinished if none has. ConfigError if they are of different machines, settings or minutes.
    """
    logs = {m: read_metrics(asked.run(m)) for m in asked.models if (asked.run(m) / "metrics.jsonl").is_file()}
    # A run that has just begun has logged nothing yet.
    found = {model: lines for model, lines in logs.items() if any("loss" in line for line in lines)}
    if not (begun := list(found)):
        raise NothingFinished(f"{asked.runs / asked.scale}: found no run of {', '.join(asked.models)}; train one first")
    timed = {model: read_begun(asked.run(model), asked.settings(model, NOMINAL)) for model in begun}
    if len(minutes := {one["minutes"] for one in timed.values()}) > 1:
        given = ", ".join(f"{model}: {one['minutes']:g}" for model, one in timed.items())
        raise ConfigError(
            f"--minutes of the runs differ ({given}), expected the same for all; select one run by --model"
        )
    settings = asked.settings(begun[0], NOMINAL)
    missing = [f"{model}: not begun" for model in asked.models if model not in begun]
    missing += [
        f"{model}: {_last(found[model])['step']} of {timed[model]['steps']} steps"
        for model in begun
        if _last(found[model])["step"] < timed[model]["steps"]
    ]
    rows = [_learned(model, found[model], asked.seed) for model in begun]
    ways = [
        Outcome({"model": model, "way": way}, {name: {asked.seed: x} for name, x in values.items()}, [model])
        for model in begun
        for way, values in timed[model]["ways"].items()
    ]
    device = device_of(settings)
    return ExperimentResult(
        "bert",
        "BERT on real text",
        DECLARED["about"],
        asked.scale,
        device,
        {
            "minutes": minutes.pop(),
            "data": settings.data.name,
            "tokens a step": settings.data.batch_size * settings.data.length,
            "precision": settings.precision,
            "overrides": list(asked.overrides),
        },
        [
            PartResult("learned", "What was learned", "How well are held-out entries predicted at the end?", rows),
            PartResult("overhead", "The step by the way it is called", DECLARED["overhead"], ways),
        ],
        of_runs(timed.values(), device),
        curves=_curves(found),
        missing=missing,
        ceilings={model: Ceilings(**timed[model]["ceilings"]) for model in begun if "ceilings" in timed[model]},
    )


def _last(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return [line for line in lines if "loss" in line][-1]


def _learned(model: str, lines: list[dict[str, Any]], seed: int) -> Outcome:
    last, logged = _last(lines), [line for line in lines if "loss" in line]
    values = {
        "steps": last["step"],
        "minutes of steps": _minutes(logged)[-1],
        "tokens/s": statistics.median(line["tokens_per_second"] for line in logged),
        "training loss": last["loss"],
        "host ms": statistics.median(line["host_ms"] for line in logged),
    }
    if scored := [line["evaluation"] for line in lines if "evaluation" in line]:
        names = {"held-out masked loss": "masked_loss", "accuracy": "masked_accuracy", "bits/byte": "bits_per_byte"}
        values |= {text: scored[-1][name] for text, name in names.items()}
    return Outcome({"model": model}, {name: {seed: float(value)} for name, value in values.items()}, [model])


def _minutes(logged: list[dict[str, Any]]) -> list[float]:
    """Return the minutes of training until each line."""
    total, before, minutes = 0.0, 0, []
    for line in logged:
        total += line["seconds_per_step"] * (line["step"] - before)
        before = line["step"]
        minutes.append(total / 60)
    return minutes


def _curves(found: dict[str, list[dict[str, Any]]]) -> list[Curve]:
    loss: dict[str, list[tuple[float, float]]] = {}
    bits: dict[str, list[tuple[float, float]]] = {}
    for model, lines in found.items():
        logged = [line for line in lines if "loss" in line]
        steps, minutes = [line["step"] for line in logged], _minutes(logged)
        loss[model] = [(at, line["loss"]) for at, line in zip(minutes, logged, strict=True)]
        # An evaluation may come between two lines of the log.
        bits[model] = [
            (float(np.interp(line["step"], [0, *steps], [0.0, *minutes])), line["evaluation"]["bits_per_byte"])
            for line in lines
            if "evaluation" in line
        ]
    training = "Training loss, means over the steps between two lines of the log, by minutes of steps."
    held_out = "Bits per byte of held-out entries (pseudo-log-likelihood), by minutes of steps."
    curves = [Curve("loss", training, "minutes of steps", "loss in nats", loss, log_y=False)]
    scored = {model: points for model, points in bits.items() if points}
    if scored:
        curves.append(Curve("bits", held_out, "minutes of steps", "bits a byte", scored, log_y=False))
    return curves
