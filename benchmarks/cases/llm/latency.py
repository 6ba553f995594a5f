"""`python -m benchmarks llm --workload latency`: start-up and time to first token of a single user.

Run as a module, it is the timed start in a separate process.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.shared import LlmBench, shown, timing_of
from benchmarks.cases.llm.sweep import prompt_operations, weight_bytes
from benchmarks.cases.llm.work import SHAPES, model
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import say
from benchmarks.harness.results import Row
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.shapes import dtype_for
from fullstride.llm.sampling_params import SamplingParams
from fullstride.measure.roofline import roofline_bound

PROMPT, ANSWER = 1024, 64
STARTS, REPEATS = 3, 20
# Of a start, in order; what each ends with.
PHASES = ("imports", "device", "model", "engine")


def settings(longest: int, dtype: str | None, kernels: str) -> EngineConfig:
    """Return engine settings as a server would use for requests of up to `longest` tokens."""
    length = min(longest, PROMPT + ANSWER)
    return EngineConfig(dtype=dtype, prefix_cache=False, max_length=length, kernels=kernels)


def run(bench: LlmBench) -> Path:
    """Time starts and first tokens; see `case.run`."""
    loaded = bench.loaded
    # First, since a GPU that JAX has taken holds nothing else.
    with tempfile.TemporaryDirectory() as folder:
        if bench.source in SHAPES:
            store(loaded.parameters, Path(folder))
        starts = _starts(bench.source, bench.dtype, bench.kernels, folder)
    engine = Engine(loaded, settings(loaded.config.max_position, bench.dtype, bench.kernels))
    prompt = min(PROMPT, engine.sizes.max_length - 1)  # as long as there is room for
    off = gate(engine, loaded.parameters, [prompt], 1)
    first = first_tokens(engine, prompt)
    ceilings = jax_ceilings(engine.sizes.dtype, "read")
    read = roofline_bound(0, weight_bytes(engine), ceilings)
    least = roofline_bound(prompt_operations(loaded.config, prompt), weight_bytes(engine), ceilings)
    rows = [
        Row("start, process and all, programs compiled before", timing_of(sum(s.values()) for s in starts), read),
        *(Row(f"of which {phase}", timing_of(start[phase] for start in starts), read) for phase in PHASES),
        Row(f"first token, prompt of {prompt}", timing_of(first), least),
    ]
    sizes: dict[str, Any] = {"max_length": engine.sizes.max_length, "max_sequences": engine.sizes.rows}
    return shown(bench.result(engine, off, ceilings, rows, section="latency", **sizes), bench.out)


def first_tokens(engine: Engine, length: int) -> list[float]:
    """Return milliseconds from a request to its first token, on an idle engine."""
    params, vocab = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), engine.model.vocab_size
    samples = []
    for turn in range(REPEATS + 1):
        prompt = [3 + (17 * turn + i * i) % (vocab - 3) for i in range(length)]
        started = time.perf_counter()
        engine.add(str(turn), prompt, params)
        # One token is the whole answer: it comes with the request's end, as an error would.
        while not (deltas := engine.step()):
            pass
        samples.append((time.perf_counter() - started) * 1e3)
        if deltas[0].error:
            raise RuntimeError(deltas[0].error)
    return samples


def store(parameters: Mapping[str, np.ndarray], folder: Path) -> None:
    """Write random weights as files, because generating them is slow and not part of a start."""
    for name, value in parameters.items():
        # NumPy's files know no bfloat16.
        np.save(folder / f"{name}.npy", value.view(f"V{value.itemsize}"))


def stored(folder: Path, dtype: Any) -> dict[str, np.ndarray]:
    """Return weights of these files, memory-mapped."""
    return {path.stem: np.load(path, mmap_mode="r").view(dtype) for path in folder.glob("*.npy")}


def _starts(source: str, dtype: str | None, kernels: str, folder: str) -> list[dict[str, float]]:
    """Return milliseconds of each phase from a command to a ready engine; the first start compiles."""
    command = [sys.executable, "-m", "benchmarks.cases.llm.latency", source, dtype or "", kernels, folder]
    samples = []
    for _ in range(STARTS + 1):
        say("starting an engine in a process of its own")
        started = time.time()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ)
        times = [started, *map(float, done.stdout.split()[-len(PHASES) :])]
        samples.append({name: (b - a) * 1e3 for name, a, b in zip(PHASES, times[:-1], times[1:], strict=True)})
    return samples


def _start(source: str, dtype: str, kernels: str, folder: str) -> None:
    times = [time.time()]
    platform = jax.devices()[0].platform
    times.append(time.time())
    loaded = model(source, dtype_for(EngineConfig(dtype=dtype or None), platform, "") or None)
    if source in SHAPES:
        loaded.parameters = stored(Path(folder), loaded.parameters["norm"].dtype)
    times.append(time.time())
    Engine(loaded, settings(loaded.config.max_position, dtype or None, kernels))
    sys.stdout.write(" ".join(map(str, [*times, time.time()])))


if __name__ == "__main__":
    _start(*sys.argv[1:5])
