"""Results with fresh random numbers, as `python -m benchmarks` writes them."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.results import CaseResult, Row, write_result
from benchmarks.harness.seeds import ExperimentResult, Outcome, PartResult, write_experiment
from benchmarks.report.frame import Results, read_results
from fullstride.measure.roofline import Ceilings, RooflineBound
from fullstride.measure.timing import Timing

SEED = random.randrange(1 << 32)
RANDOM = random.Random(SEED)
CONDITIONS: dict[str, dict[str, Any]] = {
    "meanflow-step": {"model": "unet", "precision": "bf16", "backend": "graph", "batch_size": 64},
    "meanflow-peer": {"recipe": "preset=cifar10_v1", "backend": "compile+graph", "batch_size": 128},
    "jvp-attention": {"precision": "bf16", "backend": "auto", "left_out": [{"shape": "x", "why": "no memory"}]},
    "jvp-norms": {"precision": "bf16", "backend": "auto"},
    "train-step": {"model": "base", "section": "host"},
    "llm": {"model": "smollm2", "precision": "float32", "section": "small"},
    "meanflow-loader": {"batch_size": 256},
    "meanflow-sampling": {"model": "unet", "precision": "bf16", "backend": "all"},
    "something-new": {"model": "other"},
}


def ms() -> float:
    """Draw a time over seven orders of magnitude."""
    return 10 ** RANDOM.uniform(-3, 4)


def row(name: str, /, **extra: Any) -> Row:
    """Return a row whose three samples surround its median."""
    time = ms()
    return Row(name, Timing(4 * time, (0.5 * time, time, 2 * time), None), RooflineBound(ms(), ms()), extra)


def _steps() -> list[Row]:
    names = ["FM MSE", *(f"MeanFlow {share}%" for share in (0, 25, 50, 75, 100))]
    return [
        row(f"{name}, {backend}", name=name, backend=backend, batch=64)
        for backend in ("eager", "graph")
        for name in names
    ]


def _passes(peers: dict[str, tuple[str, ...]]) -> list[Row]:
    return [
        row(f"{shape} {kind}, {who}", shape=shape, kind=kind, who=who, gflop=RANDOM.uniform(1, 9), bytes=1 << 25)
        for shape in ("B1 H2 L128 D64", "B2 H3 <L256> & $D_80$")
        for kind, whos in peers.items()
        for who in whos
    ]


def _ways() -> list[Row]:
    def extra() -> dict[str, Any]:
        return {"arrays": 9, "host": {"median_ms": ms()}, "ready": {"median_ms": ms()}, "over_flat": {"ratio": ms()}}

    return [row(name, **extra()) for name in ("filter_jit", "flat list", "TrainStep", "TrainStep grouped")]


def _images(steps: int, batch: int, backend: str) -> Row:
    made = {"sampler": "meanflow", "steps": steps, "batch": batch, "num": batch, "backend": backend}
    return row(f"meanflow {steps}, batch {batch}, {backend}", images_per_second=ms(), **made)


def _rows(case: str) -> list[Row]:
    if case == "meanflow-step":
        return _steps()
    if case == "meanflow-peer":
        return [row(name) for name in ("fullstride, bf16", "py-meanflow", "py-meanflow, augmented before")]
    if case.startswith("jvp"):
        return _passes({"forward": ("ours", "vanilla", "eager"), "primal": ("flash", "cudnn"), "through": ("ours",)})
    if case == "train-step":
        return _ways()
    if case == "llm":
        return [row(name, tokens_per_second=ms()) for name in ("fullstride", "transformers, batched")]
    if case == "meanflow-loader":
        return [row(f"pictures, {n} workers", workers=n, records_per_second=ms()) for n in (0, 1, 2)]
    if case == "meanflow-sampling":
        chosen = ((s, b, by) for by in ("eager", "graph") for b in (1, 8) for s in (1, 2))
        return [_images(*each) for each in chosen]
    return [row("first"), row("second")]


def made(case: str, commit: str | None = None) -> CaseResult:
    """Return a result of that case on a GPU."""
    environment = {
        "date": "2031-02-03T04:05:06+00:00",
        "commit": commit,
        "dirty": False,
        "cpu": "AMD EPYC",
        "cores": 2,
        "gpu": {"name": "NVIDIA H200"},
        "versions": {"torch": "2.99.1", "jax": "0.99.2"},
    }
    ceilings = Ceilings(ms() * 1e12, 4e12, "8192^3 bfloat16", 1 << 30, [1.0], [1.0])
    return CaseResult(case, "cuda", CONDITIONS[case], {}, ceilings, _rows(case), environment)


def write_all(folder: Path, commit: str | None = None) -> list[CaseResult]:
    """Write one result of every case, and one of a CPU besides."""
    results = [made(case, commit) for case in CONDITIONS]
    results.append(replace(made("meanflow-step", commit), device="cpu"))
    for result in results:
        write_result(result, folder)
    return results


def write_other(folder: Path) -> dict[str, Any]:
    """Write a file that belongs to no case."""
    data = {
        "what": "a <demo>",
        "steps": 7,
        "samplers": {"euler": {"nfe": 5, "score": {"distance": ms()}}},
        "all": [1, 2],
    }
    (folder / "demo.json").write_text(json.dumps(data))
    return data


def write_rows(
    folder: Path,
    case: str,
    rows: list[Row],
    /,
    *,
    device: str = "cuda",
    gpu: str = "a GPU",
    date: str = "2026-11-01T00:00:00+00:00",
    **conditions: Any,
) -> Results:
    """Write a result of these rows, of a GPU unless the device is cpu, and read the whole folder.

    Args:
        folder: folder to write to, which may hold other results.
        case: name of the case.
        rows: all rows of the result.
        device: device of the result, cuda or cpu.
        gpu: name of the GPU.
        date: date of the measurement.
        conditions: conditions of the result.

    """
    machine = {"cpu": "a CPU", "cores": 2, "date": date, "gpu": None if device == "cpu" else {"name": gpu}}
    ceilings = Ceilings(1e12, 1e12, "a product", 1, [1.0], [1.0])
    write_result(CaseResult(case, device, conditions, {}, ceilings, rows, machine), folder)
    return read_results(folder)


def write_parts(
    folder: Path,
    experiment: str,
    parts: dict[str, list[Outcome]],
    scale: str = "gpu",
    missing: list[str] | None = None,
    environment: dict[str, Any] | None = None,
    **conditions: Any,
) -> Results:
    """Write an experiment with the rows of each part, and read the whole folder.

    Args:
        folder: folder to write to, which may hold other results.
        experiment: name of the experiment.
        parts: rows by name of the part.
        scale: scale and device, gpu or cpu.
        missing: runs that are missing.
        environment: further entries of the environment.
        conditions: conditions of all rows.

    """
    shown = [PartResult(part, part, "Why?", rows) for part, rows in parts.items()]
    machine = {"cpu": "a CPU", "cores": 2, "gpu": {"name": "a GPU"}, "commit": None, "date": "2031-02-03"}
    machine |= environment or {}
    device = "cuda" if scale == "gpu" else "cpu"
    result = ExperimentResult(experiment, "A title", "About it.", scale, device, conditions, shown, machine)
    write_experiment(replace(result, missing=missing or []), folder)
    return read_results(folder)
