"""`python -m benchmarks llm`: this engine beside transformers, vLLM and the floor of what must be read."""

from importlib import import_module
from pathlib import Path

import jax

from benchmarks.cases.llm.beside import Peers, interpreter
from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.options import ATTENTION, RUNS, SEQUENCES, Options
from benchmarks.cases.llm.shared import Bench, complete, shown, timing_of
from benchmarks.cases.llm.sweep import weight_bytes, weight_count
from benchmarks.cases.llm.trace import traced
from benchmarks.cases.llm.work import TEMPERATURE, Work, compared, large, model, small
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import say
from benchmarks.harness.results import Row, at
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.build import chosen
from fullstride.llm.engine.shapes import DEFAULTS, dtype_for
from fullstride.measure.environment import xla_flags
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import Ceilings, Floor, floor
from fullstride.measure.timing import HostClock


def run(options: Options, out: Path) -> Path:
    """Measure, print the table, write the JSON, whose path is returned.

    ConfigError for a model that there is not, a vLLM that does not run, or kernels that cannot run the model here.
    GateError if fp32 greedy tokens are not those of what runs beside it, or see `bench_gate.gate`.
    """
    source, workload, dtype = options.model, options.workload, options.dtype
    kernels, kv_cache_dtype = options.kernels, options.kv_cache_dtype
    vllm = None if options.vllm is None else interpreter(options.vllm)
    runs, sequences = options.runs or RUNS, options.sequences or SEQUENCES
    attention, baseline = options.attention, options.baseline
    device = jax.devices()[0]
    place = "cpu" if device.platform == "cpu" else "cuda"
    asked = EngineConfig(dtype=dtype, kernels=kernels, kv_cache_dtype=kv_cache_dtype)
    loaded = model(source, dtype_for(asked, device.platform, "") or None)
    chosen(loaded.config, asked)  # what cannot run is told before anything is timed
    bench = Bench(loaded, source, place, dtype, kernels, out, kv_cache_dtype)
    if workload not in ("small", "large"):  # imported when it runs, as what a server needs no other does
        return import_module(f"benchmarks.cases.llm.{workload}").run(bench)
    vocab = loaded.config.vocab_size
    work = small(vocab) if workload == "small" else large(vocab, sequences)
    most = DEFAULTS["cpu" if place == "cpu" else "other"].rows
    count = min(len(work.prompts), most)
    # First, since a GPU that JAX has taken holds nothing else.
    peers = Peers()
    if vllm is not None:
        peers.add_vllm(vllm, source, loaded.config.dtype, runs, work, count)
    if workload == "small" and baseline is not False:
        peers.add_transformers(source, loaded.config.dtype, place, runs, attention)
    # As large as the workload, as the others' tensors are: an engine for longer ones has tables to match.
    engine = bench.engine(prefix_cache=False, max_length=work.longest, max_sequences=count)
    ceilings = jax_ceilings(engine.sizes.dtype, "read")
    least = _floor(engine, work, ceilings)
    found = _gate(engine, work, peers.greedy) | gate(engine, loaded.parameters, [*map(len, work.prompts)], count)
    samples = [HostClock().time(lambda: complete(engine, work, TEMPERATURE)) for _ in range(runs + 1)]
    rows = [_row("fullstride", samples, work, least)]
    if workload == "small" and (trace := traced(lambda: complete(engine, work, TEMPERATURE))) is not None:
        rows[0].extra["gpu"] = trace.to_dict()
        say(f"the GPU was idle for {trace.idle:.0%} of a run under the profiler")
    rows += [_row(name, samples, work, least) for name, samples in peers.times.items()]
    conditions = {
        "prompts": len(work.prompts),
        "tokens": work.tokens,
        "runs": runs,
        "temperature": TEMPERATURE,
        "max_length": work.longest,
        "max_sequences": count,
        **at(
            sequences=(sequences, SEQUENCES),
            xla=(xla_flags(), ""),
            beside=(vllm and "vllm", None),
            **{"no-baseline": (baseline is False, False), "baseline-attention": (attention, ATTENTION)},
        ),
        **peers.conditions,
    }
    result = bench.result(engine, found, ceilings, rows, section=workload, **conditions)
    result.environment["versions"] |= peers.versions
    return shown(result, out)


def _gate(engine: Engine, work: Work, theirs: dict[str, list[int]]) -> dict[str, float]:
    """How many greedy tokens differ; in fp32 none may, and of other dtypes `bench_gate.gate` judges them."""
    if not theirs:
        return {}
    (ours,) = complete(engine, compared(work), 0.0)
    wrong = {whose: sum(a != b for a, b in zip(ours, tokens, strict=True)) for whose, tokens in theirs.items()}
    for whose, count in wrong.items():
        if count and engine.sizes.dtype == "float32":
            raise GateError(f"{count} of {len(ours)} greedy tokens are not those of {whose}; not timed")
    return {f"greedy tokens that differ from {whose}, of {len(ours)}": float(n) for whose, n in wrong.items()}


def _row(name: str, samples: list[float], work: Work, least: Floor) -> Row:
    timing = timing_of(samples)
    return Row(name, timing, least, {"tokens_per_second": work.tokens / timing.median_ms * 1e3})


def _floor(engine: Engine, work: Work, ceilings: Ceilings) -> Floor:
    pool = engine._runner.state.pool
    everything = work.tokens + sum(map(len, work.prompts))
    moved = work.floor_bytes(weight_bytes(engine), pool.nbytes // pool.shape[2])
    return floor(2 * weight_count(engine.model) * everything, moved, ceilings)
