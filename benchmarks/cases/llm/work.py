"""Workloads of `benchmarks llm`: prompts, lengths of answers, and models without files; imports no framework."""

import math
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from fullstride.llm.config import ModelConfig, parameter_shapes

# Of the config.json of Qwen/Qwen3-0.6B and Qwen/Qwen3-8B; their weights are random here, which takes the same time.
SHAPES = {
    "qwen3-0.6b": ModelConfig(
        "qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, 40_960, rope_theta=1e6, tied=True, qk_norm=True
    ),
    "qwen3-8b": ModelConfig("qwen3", 151_936, 4096, 12_288, 36, 32, 8, 128, 40_960, rope_theta=1e6, qk_norm=True),
}
TEMPERATURE = 0.7
# Greedy tokens that engines are compared by, after so many of the last prompt.
GATE_TOKENS, GATE_PROMPT = 20, 36
# Weights from which on they are so many that drawing each of them takes longer than all else, and the prime number of
# those that are drawn in their place: no width divides it, so that no two rows are the same.
MANY, DRAWN = 100_000_000, 16_777_259


@dataclass(frozen=True)
class ModelWork:
    """Prompts as token ids, and the number of tokens of each answer."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(self.outputs)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence at its end."""
        return max(len(prompt) + n for prompt, n in zip(self.prompts, self.outputs, strict=True))

    def floor_bytes(self, weights: int, kv: int) -> int:
        """Return the bytes to read at least: the weights once a step, and the context of each generated token once."""
        contexts = sum(n * len(prompt) + n * (n - 1) // 2 for prompt, n in zip(self.prompts, self.outputs, strict=True))
        return max(self.outputs) * weights + kv * contexts


def compared(work: ModelWork) -> ModelWork:
    """Return the short greedy workload on which engines are compared."""
    return ModelWork([work.prompts[-1][:GATE_PROMPT]], [GATE_TOKENS])


def small(vocab: int) -> ModelWork:
    """Return four prompts with answers of 100 tokens each."""
    draw = random.Random(0)
    return ModelWork([[draw.randrange(3, vocab) for _ in range(n)] for n in (12, 20, 28, 36)], [100] * 4)


def large(vocab: int, sequences: int, longest: int = 1024) -> ModelWork:
    """Draw nano-vllm's bench.py workload: prompts and answers of 100 to 1024 tokens, seed 0."""
    draw = random.Random(0)
    prompts = [
        [draw.randint(0, min(10_000, vocab - 1)) for _ in range(draw.randint(100, longest))] for _ in range(sequences)
    ]
    return ModelWork(prompts, [draw.randint(100, longest) for _ in range(sequences)])


class RandomParameters(Mapping[str, np.ndarray]):
    """Random parameters generated on access, the same each time; small, so that activations stay finite."""

    def __init__(self, config: ModelConfig, dtype: str):
        self._shapes = parameter_shapes(config)
        # NumPy itself knows no bfloat16.
        self._dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)

    def __getitem__(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        return (1 + 0.1 * values if len(shape) == 1 else 0.03 * values).astype(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class TiledParameters(RandomParameters):
    """Parameters that repeat a few random numbers, at another offset in each parameter; they can be read in parts."""

    def __init__(self, config: ModelConfig, dtype: str):
        super().__init__(config, dtype)
        drawn = (0.03 * np.random.default_rng(0).standard_normal(DRAWN, np.float32)).astype(self._dtype)
        # Twice, so that as many from any one on are a view.
        self._numbers = np.concatenate([drawn, drawn])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read(name)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray:
        """Return a part of a parameter, as `fullstride.llm.weights.Parameters` does."""
        shape = self._shapes[name]
        start, stop, _ = (rows or slice(None)).indices(shape[0])
        width = math.prod(shape[1:])
        first = (zlib.crc32(name.encode()) + start * width) % DRAWN
        values = np.resize(self._numbers[first : first + DRAWN], (stop - start, *shape[1:]))
        return 1 + values if len(shape) == 1 else values[:, columns or slice(None)]


def model(source: str, dtype: str | None) -> Any:
    """Load a model from a file, or one of `SHAPES` with random weights and no tokenizer."""
    if source not in SHAPES:
        from fullstride.llm.weights import load

        return load(source, dtype=dtype)
    from dataclasses import replace

    config = replace(SHAPES[source], dtype=dtype or SHAPES[source].dtype)
    many = sum(map(math.prod, parameter_shapes(config).values())) > MANY
    parameters = (TiledParameters if many else RandomParameters)(config, config.dtype)
    return SimpleNamespace(config=config, parameters=parameters, tokenizer=None)
