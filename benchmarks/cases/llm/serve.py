"""`python -m benchmarks llm --workload serve`: latency and throughput of the HTTP server, compared with its engine.

The clients of a row each send one streamed request after the other, from a separate process. Before the server
starts, the engine answers as many prompts of the same lengths at once.
"""

import string
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models

from benchmarks.cases.llm.clients import LONGEST, ClientRequest, Heard, ask
from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.shared import LlmBench, complete, shown
from benchmarks.cases.llm.sweep import prompt_operations, weight_bytes, weight_count
from benchmarks.cases.llm.work import TEMPERATURE, ModelWork
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import say
from benchmarks.harness.results import Row, at, write_result
from fullstride.errors import ConfigError
from fullstride.llm.engine import Engine
from fullstride.llm.server.app import create_app
from fullstride.llm.server.launch import background
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.text.tokenizer import Tokenizer
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import Ceilings, roofline_bound
from fullstride.measure.timing import HostClock, Timing

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
PATIENT = ServerLimits(queue_seconds=LONGEST, total_seconds=LONGEST)


def run(bench: LlmBench) -> Path:
    """Time answers by number of clients, a row each, written as it is found; see `case.run`.

    ConfigError for a model of too short sequences. GateError if an answer does not come, or has not as many tokens as
    were asked for, or a block of the KV cache does not come back; or see `gate.gate`.
    """
    loaded, (prompt, answer) = bench.loaded, LENGTHS[bench.place]
    longest, clients = min(prompt + answer, loaded.config.max_position), CLIENTS[bench.place]
    if longest <= answer:
        expected = f"expected more than the {answer} of an answer"
        raise ConfigError(f"{bench.source}: the model supports {longest} tokens per sequence, {expected}")
    tokenizer = loaded.tokenizer or stand_in(loaded.config.vocab_size)
    worded: Any = SimpleNamespace(config=loaded.config, parameters=loaded.parameters, tokenizer=tokenizer)
    engine = replace(bench, loaded=worded).engine(max_length=longest, max_sequences=max(clients))
    off = gate(engine, bench.numbers(engine), [longest - answer], max(clients))
    ceilings = jax_ceilings(engine.sizes.dtype, "read")
    alone = {count: _alone(engine, count, longest - answer, answer) for count in clients}
    conditions = {
        "prompt": longest - answer,
        "answer": answer,
        "questions a client": QUESTIONS,
        "temperature": TEMPERATURE,
        "tokenizer": "a stand-in" if loaded.tokenizer is None else "the model's",
        **at(adapters=(bench.adapters, 0)),
    }
    rows: list[Row] = []
    result = bench.result(engine, off, ceilings, rows, "llm-serve", **conditions)
    served = ServedModel((NAME,), tokenizer, longest, adapters=engine.adapters)
    app = create_app(engine, served, concurrent=engine.sizes.rows, limits=PATIENT)
    with background(app) as url:
        for count in clients:
            rows.append(_row(url, engine, count, conditions, ceilings, alone[count]))
            write_result(result, bench.out)
    return shown(result, bench.out)


def stand_in(vocab: int) -> Tokenizer:
    """Return a byte-level tokenizer of letters for a model that has none; its text has no meaning."""
    letters = string.ascii_lowercase
    words = {"".join(letters[i // len(letters) ** power % len(letters)] for power in range(4)): i for i in range(vocab)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, vocab_size=vocab)


def _prompts(engine: Engine, seed: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(seed).integers(3, engine.model.vocab_size, shape).tolist()


def _alone(engine: Engine, count: int, prompt: int, answer: int) -> float:
    """Return the engine's tokens per second with this many prompts at once, repeatedly."""
    seconds = 0.0
    for turn in range(QUESTIONS + 1):
        work = ModelWork(_prompts(engine, (count, turn), (count, prompt)), [answer] * count)
        seconds += HostClock().time(partial(complete, engine, work, TEMPERATURE)) / 1e3 * (turn > 0)
    return QUESTIONS * count * answer / seconds


def _row(url: str, engine: Engine, count: int, conditions: dict[str, Any], ceilings: Ceilings, alone: float) -> Row:
    """Measure a number of clients at once; its times are per token after an answer's first part."""
    prompt, answer = conditions["prompt"], conditions["answer"]
    first, timed = (_heard(url, engine, count, questions, prompt, answer) for questions in (1, QUESTIONS))
    speed = timed.tokens / timed.seconds
    say(f"{count} clients at once: {speed:.1f} tokens/s; the engine alone: {alone:.1f}")
    read = roofline_bound(prompt_operations(engine.model, prompt), weight_bytes(engine), ceilings)
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
    least = roofline_bound(2 * weight_count(engine.model), weight_bytes(engine), ceilings)
    return Row(f"{count} at once", Timing(first.paces[0], tuple(timed.paces), None), least, extra)


def _heard(url: str, engine: Engine, count: int, questions: int, prompt: int, answer: int) -> Heard:
    """Measure `count` clients, each sending `questions` new prompts.

    GateError if the answers have another number of tokens than requested.
    """
    slots = _prompts(engine, (count, OTHERS + questions), (count, questions, prompt))
    heard = ask(ClientRequest(url, (NAME, *engine.adapters), slots, answer, TEMPERATURE))
    if heard.tokens != count * questions * answer:
        raise GateError(f"{count} clients: received {heard.tokens} tokens, expected {count * questions * answer}")
    while engine.busy:
        sleep(1e-3)
    if lost := engine.stats().blocks - engine.stats().free_blocks:
        raise GateError(f"{count} clients: {lost} blocks of the KV cache did not come back")
    return heard
