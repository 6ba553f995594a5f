"""`python -m benchmarks llm`: this engine compared with transformers, vLLM and the roofline bound."""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from benchmarks.cases.llm.beside import Peers, interpreter
from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.options import ATTENTION, RUNS, SEQUENCES, LlmOptions
from benchmarks.cases.llm.packed import StoredParameters
from benchmarks.cases.llm.shared import LlmBench, complete, shown, timing_of
from benchmarks.cases.llm.sweep import token_bytes, weight_bytes, weight_count
from benchmarks.cases.llm.work import SHAPES, TEMPERATURE, ModelWork, compared, large, model, small
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import say
from benchmarks.harness.environment import xla_flags
from benchmarks.harness.results import Row, at
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.build import select_kernels
from fullstride.llm.engine.shapes import DEFAULTS, dtype_for
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import Ceilings, RooflineBound, roofline_bound
from fullstride.measure.timing import HostClock

DEVICE, STREAM = "/device:GPU", "Stream"


class Span(NamedTuple):
    """Kernel or copy on a GPU, in nanoseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """Kernels of a GPU between its first and its last one."""

    wall_ms: float  # from the one to the other
    busy_ms: float  # in which at least one ran
    kernels: dict[str, tuple[int, float]]  # times they ran and milliseconds in all, longest first

    @property
    def idle(self) -> float:
        """Fraction of the time in which no kernel ran."""
        return 1 - self.busy_ms / self.wall_ms

    def to_dict(self, most: int = 12) -> dict[str, Any]:
        """Return a JSON-serialisable summary with the longest kernels."""
        longest = [{"name": name, "count": n, "ms": ms} for name, (n, ms) in list(self.kernels.items())[:most]]
        return {"wall_ms": self.wall_ms, "busy_ms": self.busy_ms, "idle": self.idle, "kernels": longest}


def traced(call: Callable[[], object]) -> Trace | None:
    """Run a function under the profiler; return None if no GPU did anything."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (file,) = Path(folder).rglob("*.xplane.pb")
        found = spans(ProfileData.from_file(str(file)).planes)
    return trace_of(found) if found else None


def spans(planes: Iterable[Any]) -> list[Span]:
    """Return the kernels that ran on GPU streams; other lines of the planes repeat them."""
    lines = (line for plane in planes if plane.name.startswith(DEVICE) for line in plane.lines)
    events = (event for line in lines if line.name.startswith(STREAM) for event in line.events)
    return [Span(event.name, event.start_ns, event.start_ns + event.duration_ns) for event in events]


def trace_of(found: list[Span]) -> Trace:
    """Sum up the spans; overlapping ones count once."""
    ordered = sorted(found, key=lambda span: span.start)
    busy, until = 0.0, ordered[0].start
    kernels: dict[str, tuple[int, float]] = {}
    for span in ordered:
        busy += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
        count, ms = kernels.get(span.name, (0, 0.0))
        kernels[span.name] = count + 1, ms + (span.end - span.start) / 1e6
    longest = dict(sorted(kernels.items(), key=lambda item: -item[1][1]))
    return Trace((until - ordered[0].start) / 1e6, busy / 1e6, longest)


def run(options: LlmOptions, out: Path) -> Path:
    """Measure, print the table and write the JSON; return its path.

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
    asked = EngineConfig(dtype=dtype, kernels=kernels, kv_cache_dtype=kv_cache_dtype, quantize=options.quantize)
    loaded = model(source, dtype_for(asked, device.platform, "") or None)
    if options.quantize == "stored" and source in SHAPES:
        loaded.parameters = StoredParameters(loaded.config, loaded.config.dtype)
    select_kernels(loaded.config, asked)  # what cannot run is told before anything is timed
    bench = LlmBench(
        loaded, source, place, dtype, kernels, out, kv_cache_dtype, options.adapters or 0, options.minutes or 0.0,
        options.quantize,
    )  # fmt: skip
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
    for peer in options.peers:
        peers.add(peer, source, loaded.config.dtype, place, runs, work, count)
    if workload == "small" and baseline is not False and not options.peers:
        peers.add_transformers(source, loaded.config.dtype, place, runs, attention)
    # As large as the workload, as the others' tensors are: an engine for longer ones has tables to match.
    engine = bench.engine(prefix_cache=False, max_length=work.longest, max_sequences=count)
    ceilings = jax_ceilings(engine.sizes.dtype, "read")
    least = _floor(engine, work, ceilings)
    found = _gate(engine, work, peers.greedy) | gate(engine, bench.numbers(engine), [*map(len, work.prompts)], count)
    samples = [HostClock().time(lambda: complete(engine, work, TEMPERATURE)) for _ in range(runs + 1)]
    rows = [_row("fullstride", samples, work, least)]
    if workload == "small" and (trace := traced(lambda: complete(engine, work, TEMPERATURE))) is not None:
        rows[0].extra["gpu"] = trace.to_dict()
        say(f"the GPU was idle for {trace.idle:.0%} of a run under the profiler")
    for name, samples in peers.times.items():
        rows.append(_row(name, samples, work, least))
        rows[-1].extra["flags"] = peers.flags[name]
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
            beside=(tuple(peer.name for peer in options.peers) or (vllm and "vllm"), None),
            **{"no-baseline": (baseline is False, False), "baseline-attention": (attention, ATTENTION)},
        ),
        **peers.conditions,
    }
    result = bench.result(engine, found, ceilings, rows, section=workload, **conditions)
    result.environment["versions"] |= peers.versions
    return shown(result, out)


def _gate(engine: Engine, work: ModelWork, theirs: dict[str, list[int]]) -> dict[str, float]:
    """Return how many greedy tokens differ; fp32 allows none, and `gate.gate` judges other data types."""
    if not theirs:
        return {}
    (ours,) = complete(engine, compared(work), 0.0)
    wrong = {whose: sum(a != b for a, b in zip(ours, tokens, strict=True)) for whose, tokens in theirs.items()}
    for whose, count in wrong.items():
        if count and engine.sizes.dtype == "float32":
            raise GateError(f"{count} of {len(ours)} greedy tokens differ from those of {whose}; not timed")
    return {f"greedy tokens that differ from {whose}, of {len(ours)}": float(n) for whose, n in wrong.items()}


def _row(name: str, samples: list[float], work: ModelWork, least: RooflineBound) -> Row:
    timing = timing_of(samples)
    return Row(name, timing, least, {"tokens_per_second": work.tokens / timing.median_ms * 1e3})


def _floor(engine: Engine, work: ModelWork, ceilings: Ceilings) -> RooflineBound:
    everything = work.tokens + sum(map(len, work.prompts))
    moved = work.floor_bytes(weight_bytes(engine), token_bytes(engine))
    return roofline_bound(2 * weight_count(engine.model) * everything, moved, ceilings)
