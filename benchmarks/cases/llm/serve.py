"""`python -m benchmarks llm --workload serve`: what clients get from the HTTP server, beside its engine alone.

As many clients as a row says each ask one question after the other, streamed, from a process of their own. Before the
server starts, the engine answers as many prompts of the same lengths at once.
"""

import string
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models

from benchmarks.cases.llm.clients import LONGEST, Asked, Heard, ask
from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.shared import complete, name_of, shown
from benchmarks.cases.llm.sweep import prompt_operations, weight_count
from benchmarks.cases.llm.work import TEMPERATURE, Work
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import say
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row, write_result
from fullstride.errors import ConfigError
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.server.app import create_app
from fullstride.llm.server.limits import Limits
from fullstride.llm.server.run import background
from fullstride.llm.server.served_model import Served
from fullstride.llm.text.tokenizer import Tokenizer
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import Ceilings, floor
from fullstride.measure.timing import Timing

# Tokens of a prompt and of an answer, and clients at once, by place.
LENGTHS = {"cpu": (128, 64), "cuda": (1024, 128)}
CLIENTS = {"cpu": (1, 4, 16), "cuda": (1, 4, 16, 64, 256)}
# Questions of each client, after one that does not count.
QUESTIONS = 3
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}
# Seeds from which on prompts are the clients': a prefix that the engine alone has read would be in its cache.
OTHERS = 1000
NAME = "model"
# Slow models have their time.
PATIENT = Limits(queue_seconds=LONGEST, total_seconds=LONGEST)


def run_serve(loaded: Any, source: str, place: str, dtype: str | None, kernels: str, out: Path) -> Path:
    """Time answers by number of clients, a row each, written as it is found; see `bench.run`.

    Raises:
        ConfigError: for a model of too short sequences.
        GateError: if an answer does not come, or has not as many tokens as were asked for; or see `bench_gate.gate`.

    """
    prompt, answer = LENGTHS[place]
    longest, clients = min(prompt + answer, loaded.config.max_position), CLIENTS[place]
    if longest <= answer:
        raise ConfigError(f"{source}: sequences of at most {longest} tokens, expected more than an answer's {answer}")
    tokenizer = loaded.tokenizer or stand_in(loaded.config.vocab_size)
    worded: Any = SimpleNamespace(config=loaded.config, parameters=loaded.parameters, tokenizer=tokenizer)
    engine = Engine(worded, EngineConfig(dtype=dtype, kernels=kernels, max_length=longest, max_sequences=max(clients)))
    off = gate(engine, loaded.parameters, [longest - answer], max(clients))
    ceilings = jax_ceilings(engine.sizes.dtype, "read")
    alone = {count: _alone(engine, count, longest - answer, answer) for count in clients}
    conditions = {
        "model": name_of(source),
        "precision": engine.sizes.dtype,
        "kernels": engine.kernels,
        "prompt": longest - answer,
        "answer": answer,
        "questions a client": QUESTIONS,
        "temperature": TEMPERATURE,
        "tokenizer": "a stand-in" if loaded.tokenizer is None else "the model's",
    }
    found, rows = environment(), []
    app = create_app(engine, Served((NAME,), tokenizer, longest), concurrent=engine.sizes.rows, limits=PATIENT)
    result = CaseResult("llm-serve", place, conditions, off, ceilings, rows, found)
    with background(app) as url:
        for count in clients:
            rows.append(_row(url, engine, count, conditions, ceilings, alone[count]))
            write_result(result, out)
    return shown(result, out)


def stand_in(vocab: int) -> Tokenizer:
    """A byte-level tokenizer of that many tokens of letters, for a model that has none; its text means nothing."""
    letters = string.ascii_lowercase
    words = {"".join(letters[i // len(letters) ** power % len(letters)] for power in range(4)): i for i in range(vocab)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, vocab_size=vocab)


def _prompts(engine: Engine, seed: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(seed).integers(3, engine.model.vocab_size, shape).tolist()


def _alone(engine: Engine, count: int, prompt: int, answer: int) -> float:
    """Tokens a second of the engine with so many prompts at once, again and again."""
    seconds = 0.0
    for turn in range(QUESTIONS + 1):
        work = Work(_prompts(engine, (count, turn), (count, prompt)), [answer] * count)
        started = time.perf_counter()
        complete(engine, work, TEMPERATURE)
        seconds += (time.perf_counter() - started) * (turn > 0)
    return QUESTIONS * count * answer / seconds


def _row(url: str, engine: Engine, count: int, conditions: dict[str, Any], ceilings: Ceilings, alone: float) -> Row:
    """So many clients at once; its times are those of a token after an answer's first part."""
    prompt, answer = conditions["prompt"], conditions["answer"]
    first, timed = (_heard(url, engine, count, questions, prompt, answer) for questions in (1, QUESTIONS))
    speed = timed.tokens / timed.seconds
    say(f"{count} at once: {speed:.1f} tokens/s, the engine alone {alone:.1f}")
    weights, size = weight_count(engine.model), np.dtype(engine.sizes.dtype).itemsize
    read = floor(prompt_operations(engine.model, prompt), weights * size, ceilings)
    extra = {
        "batch": count,
        "requests": len(timed.firsts),
        "tokens_per_second": speed,
        "engine_tokens_per_second": alone,
        "share_of_the_engine": speed / alone,
        "first_token_ms": {name: float(np.quantile(timed.firsts, q)) for name, q in QUANTILES.items()},
        "first_token_floor_ms": read.ms,
    }
    # How many decode at a time, and with how much context, the clients decide: all weights are read for one.
    least = floor(2 * weights, weights * size, ceilings)
    return Row(f"{count} at once", Timing(first.paces[0], tuple(timed.paces), None), least, extra)


def _heard(url: str, engine: Engine, count: int, questions: int, prompt: int, answer: int) -> Heard:
    """What so many clients hear, each asking so many questions that nobody asked before.

    Raises:
        GateError: if answers do not have as many tokens as were asked for.

    """
    slots = _prompts(engine, (count, OTHERS + questions), (count, questions, prompt))
    heard = ask(Asked(url, NAME, slots, answer, TEMPERATURE))
    if heard.tokens != count * questions * answer:
        raise GateError(f"{count} clients: {heard.tokens} tokens came, {count * questions * answer} were asked for")
    return heard
