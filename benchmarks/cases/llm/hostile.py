"""`python -m benchmarks llm --workload hostile`: how long others wait while the HTTP server gets the worst requests.

A row for the idle server, and one for each attack: some clients send the same again and again, while two others ask for
one token and for /health, one request after the other. All clients are in processes of their own, and the server is as
`fullstride llm serve` starts it.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases.llm.attacks import ATTACKS
from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.hostile_clients import CUT_OFF, attack, waited
from benchmarks.cases.llm.shared import name_of, shown
from benchmarks.cases.llm.sweep import prompt_operations, weight_count
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import say
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row, write_result
from fullstride.errors import ConfigError
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.server.app import create_app
from fullstride.llm.server.run import background
from fullstride.llm.server.served_model import Served
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import Floor, floor
from fullstride.measure.timing import Timing

# Seconds of a row, bytes of an attack's request, clients that attack, and tokens of a small prompt.
SECONDS, SIZE, ATTACKERS, PROMPT = 20.0, 2_000_000, 2, 16
IDLE, NAME = "idle", "model"


def run_hostile(loaded: Any, source: str, place: str, dtype: str | None, kernels: str, out: Path) -> Path:
    """Time small completions and /health, idle and by attack, a row each, written as it is found; see `bench.run`.

    Raises:
        ConfigError: for a model without a tokenizer, an end of texts or a chat template.
        GateError: if a small request is refused, or an attack is answered otherwise than it should be; or see
            `bench_gate.gate`.

    """
    tokenizer = loaded.tokenizer
    if tokenizer is None or not tokenizer.eos or tokenizer.template is None:
        expected = "a model with a tokenizer, an end of texts and a chat template, which requests attack"
        raise ConfigError(f"{source} with --workload hostile: expected {expected}; give another --model")
    engine = Engine(loaded, EngineConfig(dtype=dtype, kernels=kernels))
    off = gate(engine, loaded.parameters, [PROMPT], 1)
    ceilings = jax_ceilings(engine.sizes.dtype, "read")
    read = weight_count(engine.model) * np.dtype(engine.sizes.dtype).itemsize
    least = floor(prompt_operations(engine.model, PROMPT), read, ceilings)
    conditions = {
        "model": name_of(source),
        "precision": engine.sizes.dtype,
        "kernels": engine.kernels,
        "prompt": PROMPT,
        "answer": 1,
        "seconds a row": SECONDS,
        "bytes of an attack's request": SIZE,
        "clients that attack": ATTACKERS,
        "max_length": engine.sizes.max_length,
        "max_sequences": engine.sizes.rows,
    }
    rows: list[Row] = []
    served = Served((NAME,), tokenizer, engine.sizes.max_length)
    app = create_app(engine, served, concurrent=engine.sizes.rows, grammars=engine.grammars)
    result = CaseResult("llm-hostile", place, conditions, off, ceilings, rows, environment())
    with _quiet(), background(app) as url:
        asked = {"url": url, "model": NAME, "vocab": engine.model.vocab_size, "prompt": PROMPT, "seconds": SECONDS}
        for name in (IDLE, *ATTACKS):
            rows.append(_row(name, asked, least))
            write_result(result, out)
    return shown(result, out)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without uvicorn's warning for each header that is none."""
    logger = logging.getLogger("uvicorn.error")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _row(name: str, asked: dict[str, Any], least: Floor) -> Row:
    """Its times are those of the small completions; the first of each kind does not count."""
    extra: dict[str, Any] = {}
    if name == IDLE:
        times = waited(asked)
    else:
        with attack({"url": asked["url"], "attack": name, "size": SIZE, "clients": ATTACKERS}) as found:
            times = waited(asked)
        extra = _answered(name, **found)
    first, *others = times["request"]
    extra |= {"request_ms": spread(others), "health_ms": spread(times["health"][1:])}
    for kind in ("request", "health"):
        say(f"{name}: {kind} " + ", ".join(f"{key} {value:.4g}" for key, value in extra[f"{kind}_ms"].items()))
    return Row(name, Timing(first, tuple(others), None), least, extra)


def _answered(name: str, answers: dict[str, int], seconds: float) -> dict[str, Any]:
    """How often an attack was answered, and how.

    Raises:
        GateError: if the server did something else with it than it is to cost.

    """
    expected = str(ATTACKS[name].status)
    if expected not in answers or answers.keys() - {expected, CUT_OFF}:
        raise GateError(f"{name}: answers by status are {answers}, expected {expected} alone")
    return {"attack_answers": answers, "attacks_per_second": sum(answers.values()) / seconds}


def spread(times: list[float]) -> dict[str, float]:
    """How many there are, their median, 99th percentile and the longest, in milliseconds."""
    median, high = (float(np.quantile(times, q)) for q in (0.5, 0.99))
    return {"count": float(len(times)), "median": median, "p99": high, "max": max(times)}
