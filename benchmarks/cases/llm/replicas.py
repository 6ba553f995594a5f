"""`python -m benchmarks llm --workload replicas`: several engines behind one server, compared with one.

The server is timed without HTTP: one event loop, a thread per engine, and the routing of a prompt to the engine that
has its prefix cached.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.cases.llm.devices import REPEATS, SEQUENCES, Report, counts, named, on_devices, settings
from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.parallel import floor_of
from benchmarks.cases.llm.shared import LlmBench, timing_of
from benchmarks.cases.llm.work import TEMPERATURE
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import say
from benchmarks.harness.results import Row
from fullstride.errors import ConfigError
from fullstride.llm.engine import Engine
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.server.job import EnginePrompt
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.metrics import Metrics
from fullstride.llm.server.request_manager import RequestManager
from fullstride.measure.roofline import RooflineBound

# Of a conversation, in tokens but for its turns: each question stands behind all that was said before.
TURNS, OPENING, QUESTION, ANSWER = 3, 128, 32, 100
# Tokens of the first and of the last one.
PROMPTS = (OPENING + QUESTION, OPENING + TURNS * QUESTION + (TURNS - 1) * ANSWER)
# Token budget of a step: a question of every conversation fits.
BUDGET = 1024


def run(bench: LlmBench) -> Path:
    """Time conversations with 1, 2, 4 and 8 engines behind one server, 16 with each at once; see `case.run`;
    ConfigError for a model of too short sequences.
    """
    longest, whole = bench.loaded.config.max_position, OPENING + TURNS * (QUESTION + ANSWER)
    if longest < whole:
        raise ConfigError(
            f"{bench.source}: the model supports {longest} tokens per sequence, a conversation needs {whole}"
        )
    loaded = on_devices(bench.loaded)
    config = settings(loaded.config, bench.dtype, bench.kernels, prefix_cache=True, max_tokens_per_step=BUDGET)
    engines: list[Engine] = []
    off: dict[str, float] = {}
    report: Report | None = None
    for count in counts():
        while len(engines) < count:
            started = time.perf_counter()
            engines.append(Engine(loaded, config, devices=[jax.devices()[len(engines)]]))
            say(f"engine {len(engines)}: ready after {time.perf_counter() - started:.1f} s")
            off |= gate(engines[-1], loaded.parameters, PROMPTS, SEQUENCES, f"engine {len(engines)}")
        first = engines[0]
        if report is None:
            ceilings = jax_ceilings(first.sizes.dtype, "read")
            report = Report(bench, first.sizes.dtype, "replicas", [first.kernels], ceilings, off)
            report.extra = {"turns": TURNS, "opening": OPENING, "question": QUESTION, "answer": ANSWER}
        before = [engine.stats() for engine in engines]
        timing = timing_of(_samples(engines, REPEATS + 1))
        queries, hits = (
            sum(getattr(engine.stats(), name) - getattr(old, name) for engine, old in zip(engines, before, strict=True))
            for name in ("prefix_queries", "prefix_hits")
        )
        tokens = count * SEQUENCES * TURNS * ANSWER
        extra = {
            "devices": count,
            "batch": SEQUENCES,
            "context": 0,
            "kernels": first.kernels,
            "tokens_per_second": tokens / timing.median_ms * 1e3,
            "found_in_prefix_caches": hits / queries,
        }
        name = f"{named(count)}, an engine each, {SEQUENCES} conversations each"
        report.add(Row(name, timing, _floor(first, report), extra))
    assert report is not None
    return report.shown()


def _floor(engine: Engine, report: Report) -> RooflineBound:
    """Return the roofline bound of the decode steps alone, each at the mean context length."""
    context = OPENING + TURNS * (QUESTION + ANSWER) // 2
    step = floor_of(engine, SEQUENCES, context, report.ceilings, 0.0)
    return RooflineBound(step.arithmetic_ms * TURNS * ANSWER, step.memory_ms * TURNS * ANSWER)


def _samples(engines: Sequence[Engine], repeats: int) -> Iterator[float]:
    """Return milliseconds until all conversations have ended; each sample has new conversations."""
    vocabulary = engines[0].model.vocab_size
    for seed in range(repeats):
        rng = np.random.default_rng((len(engines), seed))
        shape = len(engines) * SEQUENCES, OPENING + TURNS * QUESTION
        words = rng.integers(3, vocabulary, shape).tolist()
        yield asyncio.run(_served(engines, words))


async def _served(engines: Sequence[Engine], words: Sequence[Sequence[int]]) -> float:
    """Return the milliseconds of these conversations, all at once."""
    async with RequestManager(engines, ServerLimits(), Metrics(), concurrent=SEQUENCES) as bridge:
        started = time.perf_counter()
        await asyncio.gather(*(_talk(bridge, own) for own in words))
        return (time.perf_counter() - started) * 1e3


async def _talk(bridge: RequestManager, words: Sequence[int]) -> None:
    """Hold one conversation: each question follows the earlier answers."""
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=ANSWER, ignore_eos=True)
    said, asked = list(words[:OPENING]), iter(words[OPENING:])
    for _ in range(TURNS):
        said += [next(asked) for _ in range(QUESTION)]
        job = bridge.submit([EnginePrompt(list(said), params)])
        try:
            async for _, delta in job:
                said += delta.token_ids
        finally:
            bridge.close(job)
