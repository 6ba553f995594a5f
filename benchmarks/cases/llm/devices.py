"""Shared parts of the multi-device benchmarks: device count, random weights made on the devices, incremental rows."""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from benchmarks.cases.llm.shared import LlmBench, shown
from benchmarks.cases.llm.work import TEMPERATURE, RandomParameters
from benchmarks.harness.budget import say
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row, write_result
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import EngineConfig
from fullstride.llm.models.tensor_parallel import refusal
from fullstride.measure.roofline import Ceilings

COUNTS = (1, 2, 4, 8)
# Sequences at once on each engine, and the longest of them; measurements, after a first one.
SEQUENCES, LONGEST = 16, 1024
REPEATS = 9


def settings(config: ModelConfig, dtype: str | None, kernels: str, **changes: Any) -> EngineConfig:
    """Return the settings of an engine for few sequences, which compiles few programs."""
    longest = min(LONGEST, config.max_position)
    chosen: dict[str, Any] = {
        "prefix_cache": False,
        "max_length": longest,
        "max_sequences": SEQUENCES,
        # A chunk of one tile beside them all.
        "max_tokens_per_step": SEQUENCES + 64,
        "kv_blocks": SEQUENCES * -(-longest // 16),
    }
    return EngineConfig(dtype=dtype, kernels=kernels, **chosen | changes)


def counts(config: ModelConfig | None = None) -> list[int]:
    """Return numbers of devices that exist and, if a model is given, can share it."""
    there = [n for n in COUNTS if n <= jax.device_count()]
    return there if config is None else [n for n in there if refusal(config, n) is None]


def named(count: int) -> str:
    """Return a readable name."""
    return f"{count} device{'s' * (count > 1)}"


@dataclass
class Report:
    """Rows of one section, written with every new row so that an interrupted benchmark keeps its results."""

    bench: LlmBench
    precision: str
    section: str
    kernels: Sequence[str]  # that will be measured
    ceilings: Ceilings  # of this machine
    gate: dict[str, float] = field(default_factory=dict)  # what was compared before
    extra: dict[str, Any] = field(default_factory=dict)  # further conditions
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Add a row with its speed-up over the first row of its size, and over the first with the same kernels."""
        speed = row.extra["tokens_per_second"]
        size = ("batch", "context")
        alike = [each.extra for each in (*self.rows, row) if all(each.extra[k] == row.extra[k] for k in size)]
        same = next(each for each in alike if each["kernels"] == row.extra["kernels"])
        row.extra["speed_up"] = speed / alike[0]["tokens_per_second"]
        row.extra["speed_up_of_the_same_kernels"] = speed / same["tokens_per_second"]
        self.rows.append(row)
        write_result(self.result(), self.bench.out)
        told = f"{speed:.1f} tokens/s, {row.extra['speed_up']:.2f} x"
        say(f"{row.name}: {row.timing.median_ms:.3f} ms, {told} ({row.extra['kernels']})")

    def result(self) -> CaseResult:
        """Return the result of the rows so far."""
        conditions = {
            "model": self.bench.name,
            "precision": self.precision,
            "section": self.section,
            "kernels": "+".join(dict.fromkeys(self.kernels)),
            "devices": [*dict.fromkeys(row.extra["devices"] for row in self.rows)],
            "temperature": TEMPERATURE,
            "max_length": LONGEST,
            "max_sequences": SEQUENCES,
            **self.extra,
        }
        return CaseResult("llm", self.bench.place, conditions, self.gate, self.ceilings, self.rows, environment())

    def shown(self) -> Path:
        """Print all rows and write the result again."""
        return shown(self.result(), self.bench.out)


class MadeParameters(RandomParameters):
    """Random parameters that each device generates itself; the whole is the same for any number of devices."""

    def make(self, name: str, device: Any, rows: slice | None = None, columns: slice | None = None) -> Array:
        """Return a part of a parameter on a JAX device, or all of it if no part is given."""
        shape = self._shapes[name]
        given = (rows or slice(None), columns or slice(None))[: len(shape)]
        bounds = [part.indices(size) for part, size in zip(given, shape, strict=True)]
        starts = np.array([start for start, *_ in bounds], np.int32)
        sizes = tuple(stop - start for start, stop, _ in bounds)
        own = jax.device_put((np.uint32(zlib.crc32(name.encode())), starts), device)
        return _drawn(shape, sizes, self._dtype)(*own)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.make(name, jax.devices()[0]))


@functools.cache
def _drawn(shape: tuple[int, ...], sizes: tuple[int, ...], dtype: Any) -> Any:
    """Return a function that generates a part of a parameter from its seed and offset; the whole is never stored."""

    def draw(seed, starts):
        values = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
        part = lax.dynamic_slice(values, tuple(starts), sizes)
        return (1 + 0.1 * part if len(shape) == 1 else 0.03 * part).astype(dtype)

    return jax.jit(draw)


def on_devices(loaded: Any) -> Any:
    """Return the model with its random weights generated on the devices; a model with loaded weights is unchanged."""
    if not isinstance(loaded.parameters, RandomParameters):
        return loaded
    made = MadeParameters(loaded.config, loaded.config.dtype)
    return SimpleNamespace(config=loaded.config, parameters=made, tokenizer=loaded.tokenizer)
