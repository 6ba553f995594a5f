"""The gate of `benchmarks llm`: greedy answers and their logprobs beside a dense pass in fp32, of no engine."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.cases.llm.dense import Dense
from benchmarks.cases.llm.shared import run_all, tokens_of
from fullstride.llm.engine import Engine
from fullstride.llm.engine.programs import TOP
from fullstride.llm.kernels import FP8_POOL
from fullstride.llm.outputs import Logprob
from fullstride.llm.sampling_params import SamplingParams
from fullstride.measure.gate import GateError

# Of an answer: the token that a prompt's step brings, and a burst of decode steps.
ANSWER = 9
# Nats by which logprobs may be off, root mean square, by dtype: three to five times what SmolLM2 is off by on a CPU,
# but for fp32, which is TF32 on a GPU. A choice may cost twice as many. A model that computes something else is off by
# 1 and more.
LIMITS = {"float32": 0.02, "float16": 0.04, "bfloat16": 0.25}
FP8_LIMIT = 0.6
# Of an answer: its tokens, and each one's logprobs where they were asked for.
Answer = tuple[list[int], list[tuple[Logprob, ...]]]


def gate(
    engine: Engine, parameters: Mapping[str, Any], lengths: Sequence[int], at_once: int, name: str = ""
) -> dict[str, float]:
    """What an idle engine is off by, for the shortest and the longest of some prompts.

    Each is answered alone, with logprobs; then several at once, without, by the very programs that are timed.

    Args:
        engine: that will be timed.
        parameters: of its model.
        lengths: of the workload's prompts, in tokens.
        at_once: answers that the workload has under way.
        name: of the engine, where a result has several.

    Returns:
        Figures by what they are.

    Raises:
        GateError: if logprobs are off by more than the limit of the engine's dtype, or a greedy token is less probable
            than the most probable one by more than twice that.

    """
    answer = min(ANSWER, engine.sizes.max_length - 1)
    prompts = _prompts(engine, lengths, answer)
    alone = [_answers(engine, [prompt], answer, logprobs=TOP)[0] for prompt in prompts]
    crowd = [prompts[0]] * (at_once - 1) + [prompts[-1]]
    answers = [*alone, *_answers(engine, crowd, answer, logprobs=None)]
    sequences = [(*prompt, *tokens) for prompt, (tokens, _) in zip([*prompts, *crowd], answers, strict=True)]
    distinct = list(dict.fromkeys(sequences))  # engines give many prompts the same answer
    dense = Dense(engine.model, parameters, engine.sizes.dtype, engine.devices[0])
    expected = dict(zip(distinct, dense.logprobs(distinct, answer), strict=True))
    told = [(expected[sequence], places) for sequence, (_, places) in zip(sequences, alone, strict=False)]
    greedy = [(places, places[range(answer), sequence[-answer:]]) for sequence, places in expected.items()]
    shortfall = max(float((places.max(1) - taken).max()) for places, taken in greedy)
    limit = FP8_LIMIT if engine.sizes.pool == FP8_POOL else LIMITS[engine.sizes.dtype]
    after = f", {name}" if name else ""
    error, chosen = f"error of logprobs{after}", f"greedy tokens' shortfall, {at_once} at once{after}"
    return {error: _judged(error, _error(told), limit), chosen: _judged(chosen, shortfall, 2 * limit)}


def _prompts(engine: Engine, lengths: Sequence[int], answer: int) -> list[list[int]]:
    most, vocab, draw = engine.sizes.max_length - answer, engine.model.vocab_size, random.Random("gate")
    wanted = dict.fromkeys(max(1, min(length, most)) for length in (min(lengths), max(lengths)))
    return [[draw.randrange(min(3, vocab - 1), vocab) for _ in range(length)] for length in wanted]


def _answers(engine: Engine, prompts: list[list[int]], count: int, logprobs: int | None) -> list[Answer]:
    params = SamplingParams(temperature=0.0, max_tokens=count, logprobs=logprobs, ignore_eos=True)
    found = run_all(engine, prompts, [params] * len(prompts))
    return [(tokens_of(own), [place for delta in own for place in delta.logprobs or ()]) for own in found]


def _error(told: list[tuple[np.ndarray, list[tuple[Logprob, ...]]]]) -> float:
    errors = [
        expected[each.token] - each.logprob
        for logprobs, places in told
        for expected, place in zip(logprobs, places, strict=True)
        for each in place
    ]
    return float(np.sqrt(np.mean(np.square(errors))))


def _judged(what: str, value: float, limit: float) -> float:
    if not value <= limit:  # nor if it is not a number
        raise GateError(f"{what}: {value:.3g} nats beside a dense pass in fp32, expected at most {limit:g}; not timed")
    return value
