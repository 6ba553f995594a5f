"""`python -m benchmarks llm --workload soak --minutes 120`: what the HTTP server holds after hours of mixed requests.

Clients in a process of their own send completions, streams that they leave, schemas and LoRA adapters in turn. Each
row is a part of the time; the last one has the drift of memory, descriptors, threads and waiting times.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases.llm.clients import clients, found_by
from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.hostile import spread
from benchmarks.cases.llm.serve import PATIENT
from benchmarks.cases.llm.shared import LlmBench, shown, timing_of
from benchmarks.cases.llm.soak_clients import CLIENTS, KINDS, soak
from benchmarks.cases.llm.sweep import prompt_operations, weight_bytes
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import say
from benchmarks.harness.drift import drifts, held
from benchmarks.harness.results import Row, at, write_result
from fullstride.errors import ConfigError
from fullstride.llm.engine import Engine
from fullstride.llm.server.app import create_app
from fullstride.llm.server.launch import background
from fullstride.llm.server.served_model import ServedModel
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import RooflineBound, roofline_bound

NAME, WHOLE = "model", "whole"
PROMPT = 16  # tokens of a prompt
PARTS, MINUTES = 24, 10.0
MOST = 500  # times of a row that are kept, spread over it
PATIENCE = 60.0  # seconds until everything that was left has ended


def run(bench: LlmBench) -> Path:
    """Serve mixed requests for some time, a row for each part of it, written as it is found; see `case.run`.

    ConfigError for a model without a tokenizer or an end of texts. GateError if a request gets another status than 200,
    a program is compiled meanwhile, or a block of the KV cache does not come back; or see `gate.gate`.
    """
    tokenizer = bench.loaded.tokenizer
    if tokenizer is None or not tokenizer.eos:
        raise ConfigError(f"{bench.source} with --workload soak: expected a model with a tokenizer that ends texts")
    engine = bench.engine()
    off = gate(engine, bench.numbers(engine), [PROMPT], 1)
    ceilings = jax_ceilings(engine.sizes.dtype, "read")
    least = roofline_bound(prompt_operations(engine.model, PROMPT), weight_bytes(engine), ceilings)
    seconds = 60 * (bench.minutes or MINUTES) / PARTS
    conditions = {
        "minutes": seconds * PARTS / 60,
        "clients": CLIENTS,
        "prompt": PROMPT,
        "kinds": list(KINDS),
        "max_length": engine.sizes.max_length,
        "max_sequences": engine.sizes.rows,
        **at(adapters=(bench.adapters, 0)),
    }
    rows: list[Row] = []
    result = bench.result(engine, off, ceilings, rows, "llm-soak", **conditions)
    served = ServedModel((NAME,), tokenizer, engine.sizes.max_length, adapters=engine.adapters)
    app = create_app(engine, served, concurrent=engine.sizes.rows, limits=PATIENT, grammars=engine.grammars)
    asked = {"models": [NAME, *engine.adapters], "vocab": engine.model.vocab_size, "prompt": PROMPT}
    with background(app) as url, clients(soak, asked | {"url": url, "seconds": seconds, "parts": PARTS}) as worker:
        began, compiles = time.perf_counter(), engine.stats().compiles
        for _ in range(PARTS):
            found = found_by(worker)
            hours = (time.perf_counter() - began) / 3600
            rows.append(_part(f"{60 * hours:.1f} min", found, engine, hours, least))
            write_result(result, bench.out)
        _check(engine, compiles)
    rows.append(_whole(rows, least))
    return shown(result, bench.out)


def _part(name: str, found: dict[str, Any], engine: Engine, hours: float, least: RooflineBound) -> Row:
    """Row of a part: its times are those of completions that were not left."""
    times, stats = found["times"], engine.stats()
    kept = [times[i] for i in np.linspace(0, len(times) - 1, min(MOST, len(times))).astype(int)]
    extra = {
        "hours": hours,
        "requests": found["counts"],
        "request_ms": spread(times),
        "blocks_in_use": stats.blocks - stats.free_blocks,
        "compiles": stats.compiles,
        **held(),
    }
    counts = ", ".join(f"{count} {kind}" for kind, count in found["counts"].items())
    say(f"{name}: {counts}; p95 {extra['request_ms']['p95']:.4g} ms, {extra['resident_bytes'] / 1e6:.1f} MB")
    return Row(name, timing_of(kept), least, extra)


def _check(engine: Engine, compiles: int) -> None:
    end = time.perf_counter() + PATIENCE
    while engine.busy and time.perf_counter() < end:
        time.sleep(0.01)
    stats = engine.stats()
    if lost := stats.blocks - stats.free_blocks:
        raise GateError(f"{lost} blocks of the KV cache did not come back within {PATIENCE:g} s")
    if made := stats.compiles - compiles:
        raise GateError(f"{made} programs were compiled while the server served, expected none")


def _whole(rows: list[Row], least: RooflineBound) -> Row:
    """Row of all parts, with the drift of what they have."""
    series: dict[str, list[float]] = {name: [row.extra[name] for row in rows] for name in held()}
    series |= {f"{q}_ms": [row.extra["request_ms"][q] for row in rows] for q in ("median", "p95")}
    found = drifts([row.extra["hours"] for row in rows], series)
    for name, drift in found.items():
        say(f"{name}: {drift['per_hour']:+.4g} an hour, {drift['growth']:+.2%} over the time")
    samples = [sample for row in rows for sample in row.timing.samples_ms]
    return Row(
        WHOLE, timing_of([rows[0].timing.first_ms, *samples[:: max(1, len(samples) // MOST)]]), least, {"drift": found}
    )
