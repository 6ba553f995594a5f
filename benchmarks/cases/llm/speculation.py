"""`python -m benchmarks llm --workload speculation`: prompt lookup on texts that repeat their prompts, and on others.

One request at a time, by an engine with speculative decoding and by one without; both must say the same. The shape of
Qwen3-8B has random weights, whose texts mean nothing: there one token is always the most probable, and drafts are
accepted place by place as they were for the real model, by its committed result.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.shared import LlmBench, shown, timing_of
from benchmarks.cases.llm.speculation_texts import OTHER, REPEATING
from benchmarks.cases.llm.sweep import weight_bytes
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import say
from benchmarks.harness.result_paths import RESULTS
from benchmarks.harness.results import Row, read_result
from fullstride.errors import ConfigError
from fullstride.llm.engine import Engine
from fullstride.llm.engine.prompt_lookup import repetition
from fullstride.llm.engine.sequence import Sequence as Running
from fullstride.llm.engine.speculative_config import SpeculativeConfig
from fullstride.llm.sampling_params import SamplingParams
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import roofline_bound

ANSWER, REPEATS, LONGEST = 192, 3, 1024
# Temperatures of the kinds of texts: a small model repeats itself if it always takes the most probable token.
KINDS = {"repeating": 0.0, "other": 1.0}
RECORDED = "llm--smollm2--*--speculation--*.json"
# Of random weights: the token that is always chosen, and one that never is.
CHOSEN, REJECTED = 7, 8
LARGE = 1e5


class Text(NamedTuple):
    """Prompt; and, for random weights, how many tokens of a draft are accepted at each place, -1 for no draft."""

    prompt: list[int]
    accepted: list[int]


class Replay:
    """Drafts that are accepted as it was recorded; `accepted` is the record of the text that runs."""

    free = True

    def __init__(self):
        self.accepted: list[int] = []

    def draft(self, sequences: Sequence[Running], counts: Sequence[int]) -> list[list[int]]:
        """Return drafts of the token that will be chosen, as often as recorded, and then of another one."""
        return [self._own(sequence.num_output_tokens, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _own(self, place: int, count: int) -> list[int]:
        right = self.accepted[place] if place < len(self.accepted) else -1
        return [] if right < 0 else [CHOSEN if i < right else REJECTED for i in range(count)]


@dataclass(frozen=True)
class OneToken(Mapping[str, np.ndarray]):
    """Weights that always choose the same token, by a margin that no rounding bridges."""

    parameters: Mapping[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        values = self.parameters[name]
        if name not in ("embed", "head"):
            return values
        values = np.array(values)
        # One element of the residual stream is larger than all that the layers add.
        values[:, 0] = LARGE if name == "embed" else 0.25 * (np.arange(len(values)) == CHOSEN)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


class Answer(NamedTuple):
    """Tokens of an answer, and milliseconds of the whole request and from its first tokens to its last ones."""

    tokens: list[int]
    whole: float
    decode: float


def run(bench: LlmBench) -> Path:
    """Time both engines on each kind of texts, and write a row for each; see `case.run`.

    ConfigError for a tied model without a tokenizer. GateError if the engines say different things, or see `gate.gate`.
    """
    real = bench.loaded.tokenizer is not None
    if not real:
        if bench.loaded.config.tied:
            raise ConfigError(f"{bench.source} with --workload speculation: expected qwen3-8b, or a model with texts")
        bench.loaded.parameters = OneToken(bench.loaded.parameters)
    texts = _texts(bench.loaded.tokenizer) if real else _recorded(bench.loaded.config.vocab_size)
    longest = min(LONGEST, bench.loaded.config.max_position)
    settings = {"prefix_cache": False, "max_length": longest, "max_sequences": 1, "kv_blocks": -(-longest // 16)}
    asked, plain = SpeculativeConfig(), bench.engine(**settings)
    lengths = [len(text.prompt) for kind in texts.values() for text in kind]
    off = gate(plain, bench.loaded.parameters, lengths, 1)
    drafting = bench.engine(**settings, speculative_config=asked)
    replay = None if real else Replay()
    if replay is not None and drafting._speculator is not None:
        drafting._speculator._proposer = replay
    ceilings = jax_ceilings(plain.sizes.dtype, "read")
    rows = []
    for kind, temperature in KINDS.items():
        say(f"{len(texts[kind])} {kind} texts")
        rows += _compare(kind, texts[kind], temperature, (plain, drafting), replay, asked, ceilings)
    drafts = {name: value for name, value in vars(asked).items() if value is not None}
    conditions = {"answer": ANSWER, "repeats": REPEATS, "texts of a kind": len(REPEATING), **drafts}
    return shown(bench.result(drafting, off, ceilings, rows, section="speculation", **conditions), bench.out)


def _compare(
    kind: str,
    texts: Sequence[Text],
    temperature: float,
    engines: tuple[Engine, Engine],
    replay: Replay | None,
    asked: SpeculativeConfig,
    ceilings: Any,
) -> list[Row]:
    """Return the rows of both engines on the texts of a kind, one pass after the other."""
    plain, drafting = engines
    passes: dict[Engine, list[list[Answer]]] = {engine: [] for engine in engines}
    counts = [drafting.stats()]
    for number in range(REPEATS + 1):
        for engine in engines:
            passes[engine].append([_answer(engine, text, i, temperature, replay) for i, text in enumerate(texts)])
        plainly, drafted = (sum(answer.decode for answer in passes[engine][-1]) for engine in engines)
        say(f"{kind}, pass {number}: {plainly:.0f} ms, {drafted:.0f} ms with drafts")
        counts.append(drafting.stats())
    said = [answer.tokens for answer in passes[plain][0]]
    for engine, number in ((engine, number) for engine in engines for number in range(REPEATS + 1)):
        if [answer.tokens for answer in passes[engine][number]] != said:
            raise GateError(f"{kind}: pass {number} of the engine {'with' * (engine is drafting)} says something else")
    first, last = counts[-2:]
    drafts, accepted = last.drafts - first.drafts, last.accepted_tokens - first.accepted_tokens
    tokens, read = sum(map(len, said)), weight_bytes(plain)
    rows = []
    for engine, name, steps in ((plain, "", tokens), (drafting, ", speculative", tokens - accepted)):
        timing = timing_of(sum(answer.decode for answer in each) for each in passes[engine])
        extra = {
            "tokens_per_second": tokens / timing.median_ms * 1e3,
            "whole_ms": [sum(answer.whole for answer in each) for each in passes[engine][1:]],
            "text_ms": [[answer.decode for answer in each] for each in passes[engine][1:]],
        }
        rows.append(Row(f"{kind}{name}", timing, roofline_bound(0, steps * read, ceilings), extra))
    rows[1].extra.update(
        speedup=rows[0].timing.median_ms / rows[1].timing.median_ms,
        drafts=drafts,
        draft_tokens=last.draft_tokens - first.draft_tokens,
        accepted_tokens=accepted,
        prompts=[len(text.prompt) for text in texts],
        accepted=[_accepted(text, own, asked) for text, own in zip(texts, said, strict=True)],
    )
    say(f"{kind}: {rows[1].extra['speedup']:.2f} x, {accepted} of {rows[1].extra['draft_tokens']} tokens accepted")
    return rows


def _answer(engine: Engine, text: Text, number: int, temperature: float, replay: Replay | None) -> Answer:
    """Run a text alone on an idle engine."""
    params = SamplingParams(temperature=temperature, seed=number, max_tokens=len(text.accepted) or ANSWER)
    if replay is not None:
        replay.accepted = text.accepted
    began = time.perf_counter()
    first, tokens = 0.0, list[int]()
    engine.add(str(number), text.prompt, params)
    while engine.busy:
        for delta in engine.step():
            if delta.error:
                raise RuntimeError(delta.error)
            first = first or time.perf_counter()
            tokens += delta.token_ids
    ended = time.perf_counter()
    return Answer(tokens, (ended - began) * 1e3, (ended - first) * 1e3)


def _accepted(text: Text, tokens: list[int], asked: SpeculativeConfig) -> list[int]:
    """Return how many tokens of a draft would be accepted at each place of an answer, -1 for no draft."""
    whole, found = np.asarray(text.prompt + tokens, np.int32), []
    for place in range(1, len(tokens)):
        count = len(text.prompt) + place
        start = repetition(whole[:count], asked.prompt_lookup_min, asked.prompt_lookup_max)
        if start is None:
            found.append(-1)
            continue
        following = whole[count : count + asked.num_speculative_tokens]
        draft = whole[start + np.arange(len(following)) % (count - start)]
        found.append(int(np.cumprod(draft == following).sum()))
    return [-1, *found]


def _texts(tokenizer: Any) -> dict[str, list[Text]]:
    """Return the texts as prompts of the model's chat template, with the beginnings of answers."""

    def prompt(text: str, begun: str = "") -> Text:
        asked = tokenizer.chat([{"role": "user", "content": text}])
        return Text(tokenizer.encode(asked + begun, special=False), [])

    return {"repeating": [prompt(*text) for text in REPEATING], "other": [*map(prompt, OTHER)]}


def _recorded(vocab: int) -> dict[str, list[Text]]:
    """Return random prompts as long as the real model's, with what was recorded of its answers.

    ConfigError if there is no result of the real model.
    """
    files = sorted(RESULTS.glob(RECORDED))
    if not files:
        raise ConfigError(f"{RESULTS / RECORDED}: no such file: run --model smollm2 --workload speculation first")
    rng, found = np.random.default_rng(0), {}
    for row in read_result(files[0])["rows"]:
        if "accepted" in row["extra"]:
            pairs = zip(row["extra"]["prompts"], row["extra"]["accepted"], strict=True)
            found[row["name"].partition(",")[0]] = [Text(rng.integers(9, vocab, n).tolist(), own) for n, own in pairs]
    return found
