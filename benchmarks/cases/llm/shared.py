"""Shared parts of the engine's benchmarks: a model on this machine, a whole workload, and how a result is shown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases.llm.packed import PackedNumbers
from benchmarks.cases.llm.work import ModelWork
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row, write_result
from benchmarks.harness.table import console_of, result_table
from fullstride.llm.config import FUSED, ModelConfig, parameter_shapes
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.models.adapters import adapted_matrices
from fullstride.llm.outputs import Delta
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.weights.peft_adapter import Adapter, LowRank
from fullstride.measure.roofline import Ceilings, marked
from fullstride.measure.timing import Timing

WIDTH = 120  # columns that the table needs
RANK = 8  # of random adapters


def shown(result: CaseResult, out: Path) -> Path:
    """Print a result with its tokens per second relative to the bound or the engine alone, and write it."""
    console = console_of(WIDTH)
    table, told = result_table(result), result.conditions.get("left_out")
    left_out = [each.partition(": ")[::2] for each in told.split("; ")] if isinstance(told, str) else []
    for name, _ in left_out:
        table.add_row(name, "not run")
    console.print(table)
    for name, why in left_out:
        console.print(f"{name}: not run: {why}", highlight=False)
    for row in result.rows:
        if "tokens_per_second" in row.extra:
            beside = marked(f"{1 / row.over_floor:.0%} of the roofline bound", row.over_floor)
            if "share_of_the_engine" in row.extra:
                beside = f"{row.extra['share_of_the_engine']:.0%} of the engine alone"
            console.print(f"{row.name}: {row.extra['tokens_per_second']:.1f} tokens/s, {beside}", highlight=False)
    return write_result(result, out)


@dataclass(frozen=True)
class LlmBench:
    """Model on this machine, and the settings of its engines."""

    loaded: Any
    source: str  # the model's name, file or folder
    place: str  # cpu or cuda
    dtype: str | None
    kernels: str
    out: Path  # folder of results
    kv_cache_dtype: str = "auto"
    adapters: int = 0  # number of random LoRA adapters
    minutes: float = 0.0  # of a soak
    quantize: str = "auto"

    @property
    def name(self) -> str:
        """Name of the model, from its file or folder."""
        path = Path(self.source)
        return path.stem if path.is_file() else path.name

    def numbers(self, engine: Engine) -> Mapping[str, Any]:
        """Return the parameters that an engine computes with."""
        if engine.quantize == "none":
            return self.loaded.parameters
        return PackedNumbers(self.loaded.config, self.loaded.parameters, engine.sizes.dtype, engine.quantize)

    def engine(self, **settings: Any) -> Engine:
        """Build an engine with these settings besides the given ones."""
        asked = {"dtype": self.dtype, "kernels": self.kernels, "kv_cache_dtype": self.kv_cache_dtype}
        asked["quantize"] = self.quantize
        adapters = {f"adapter-{i}": random_adapter(self.loaded.config, i) for i in range(self.adapters)}
        return Engine(self.loaded, EngineConfig(**asked, **settings), adapters=adapters)

    def result(
        self, engine: Engine, off: dict[str, float], ceilings: Ceilings, rows: list[Row], case: str = "llm",
        section: str = "", **conditions: Any,
    ) -> CaseResult:  # fmt: skip
        """Return the result of an engine with its gate's errors `off`; `conditions` are additional ones."""
        kept = {} if self.kv_cache_dtype == "auto" else {"kv_cache_dtype": self.kv_cache_dtype}
        kept |= {} if engine.quantize == "none" else {"quantize": engine.quantize}
        own = {"model": self.name, "precision": engine.sizes.dtype, **kept, **({"section": section} if section else {})}
        conditions = own | {"kernels": engine.kernels} | conditions
        return CaseResult(case, self.place, conditions, off, ceilings, rows, environment())


def timing_of(samples: Iterable[float]) -> Timing:
    """Build a timing from samples, the first of which is a warm-up."""
    first, *others = samples
    return Timing(first, tuple(others), None)


def random_adapter(model: ModelConfig, seed: int) -> Adapter:
    """Return an adapter of all matrices that adapters can change."""
    rng, shapes = np.random.default_rng(seed), parameter_shapes(model)
    names = [part for name in adapted_matrices(model) for part in FUSED.get(name, (name,))]
    updates = {}
    for name in (f"layers.{i}.{name}" for i in range(model.layers) for name in names):
        rows, columns = shapes[name]
        a, b = rng.normal(0, 0.02, (RANK, columns)), rng.normal(0, 0.02, (rows, RANK))
        updates[name] = LowRank(a.astype(np.float32), b.astype(np.float32))
    return Adapter(Path(f"random-{seed}"), RANK, updates)


def run_all(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[Delta]]:
    """Run prompts on an idle engine, all at once, with its adapters in turn; return their results."""
    names = (None, *engine.adapters)
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(i), prompt, own, adapter=names[i % len(names)])
    found: list[list[Delta]] = [[] for _ in prompts]
    while engine.busy:
        for delta in engine.step():
            if delta.error:
                raise RuntimeError(delta.error)
            found[int(delta.request_id)].append(delta)
    return found


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    """Return all tokens of an answer."""
    return [token for delta in deltas for token in delta.token_ids]


def complete(engine: Engine, work: ModelWork, temperature: float) -> list[list[int]]:
    """Run the work on an idle engine; return the tokens of each answer."""
    params = [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in work.outputs]
    return [*map(tokens_of, run_all(engine, work.prompts, params))]
