"""`python -m benchmarks llm --workload hostile`: how long others wait while the HTTP server gets the worst requests.

The idle server has a row, and so has each attack: some clients repeat the attack, while others request one token of a
prompt, one token of a chat, and /health, one request after the other. All clients are in separate processes, and the
server is as `fullstride llm serve` starts it.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.hostile_clients import ATTACKS, CUT_OFF, KINDS, attack, waited
from benchmarks.cases.llm.shared import LlmBench, shown, timing_of
from benchmarks.cases.llm.sweep import prompt_operations, weight_bytes
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import say
from benchmarks.harness.results import Row, write_result
from fullstride.errors import ConfigError
from fullstride.llm.server.app import create_app
from fullstride.llm.server.launch import background
from fullstride.llm.server.served_model import ServedModel
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import RooflineBound, roofline_bound

# Seconds of a row, bytes of an attack's request, clients that attack, and tokens of a small prompt.
SECONDS, SIZE, ATTACKERS, PROMPT = 20.0, 2_000_000, 2, 16
IDLE, NAME = "idle", "model"


def run(bench: LlmBench) -> Path:
    """Time small requests and /health, idle and by attack, a row each, written as it is found; see `case.run`.

    ConfigError for a model without a tokenizer, an end of texts or a chat template. GateError if a small request is
    refused, or an attack is answered otherwise than it should be; or see `gate.gate`.
    """
    tokenizer = bench.loaded.tokenizer
    if tokenizer is None or not tokenizer.eos or tokenizer.template is None:
        expected = "a model with a tokenizer, an end-of-text token and a chat template, which the requests attack"
        raise ConfigError(f"{bench.source} with --workload hostile: expected {expected}; give another --model")
    engine = bench.engine()
    off = gate(engine, bench.loaded.parameters, [PROMPT], 1)
    ceilings = jax_ceilings(engine.sizes.dtype, "read")
    least = roofline_bound(prompt_operations(engine.model, PROMPT), weight_bytes(engine), ceilings)
    conditions = {
        "prompt": PROMPT,
        "answer": 1,
        "seconds a row": SECONDS,
        "bytes of an attack's request": SIZE,
        "clients that attack": ATTACKERS,
        "max_length": engine.sizes.max_length,
        "max_sequences": engine.sizes.rows,
    }
    rows: list[Row] = []
    served = ServedModel((NAME,), tokenizer, engine.sizes.max_length)
    app = create_app(engine, served, concurrent=engine.sizes.rows, grammars=engine.grammars)
    result = bench.result(engine, off, ceilings, rows, "llm-hostile", **conditions)
    with _quiet(), background(app) as url:
        asked = {"url": url, "model": NAME, "vocab": engine.model.vocab_size, "prompt": PROMPT, "seconds": SECONDS}
        for name in (IDLE, *ATTACKS):
            rows.append(_row(name, asked, least))
            write_result(result, bench.out)
    return shown(result, bench.out)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress uvicorn's warning for each invalid header."""
    logger = logging.getLogger("uvicorn.error")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _row(name: str, asked: dict[str, Any], least: RooflineBound) -> Row:
    """Measure a row; its times are those of the small completions, and the first of each kind is a warm-up."""
    extra: dict[str, Any] = {}
    if name == IDLE:
        times = waited(asked)
    else:
        with attack({"url": asked["url"], "attack": name, "size": SIZE, "clients": ATTACKERS}) as found:
            times = waited(asked)
        extra = _answered(name, **found)
    extra |= {f"{kind}_ms": spread(times[kind][1:]) for kind in KINDS}
    for kind in KINDS:
        say(f"{name}: {kind} " + ", ".join(f"{key} {value:.4g}" for key, value in extra[f"{kind}_ms"].items()))
    return Row(name, timing_of(times["request"]), least, extra)


def _answered(name: str, answers: dict[str, int], seconds: float) -> dict[str, Any]:
    """How often an attack was answered, and how.

    GateError if the server answered with another status than expected.
    """
    expected = str(ATTACKS[name].status)
    if expected not in answers or answers.keys() - {expected, CUT_OFF}:
        raise GateError(f"{name}: number of answers by status is {answers}, expected only {expected}")
    return {"attack_answers": answers, "attacks_per_second": sum(answers.values()) / seconds}


def spread(times: list[float]) -> dict[str, float]:
    """Return the count, median, 95th and 99th percentile and maximum, in milliseconds."""
    median, high, higher = (float(np.quantile(times, q)) for q in (0.5, 0.95, 0.99))
    return {"count": float(len(times)), "median": median, "p95": high, "p99": higher, "max": max(times)}
