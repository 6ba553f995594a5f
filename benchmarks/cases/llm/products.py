"""`python -m benchmarks llm-products`: products of few rows with a model's matrices, compared with the roofline bound.

A program multiplies many matrices of a shape one after the other, so that neither launches nor a cache hide what
reading them takes. Each has rows of its own: XLA would join products that share theirs.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.table import Table

from benchmarks.cases.llm.attention import GLANCE, PLAN, PROGRAM_MS, TARGETS
from benchmarks.cases.llm.options import ROWS, ProductsOptions
from benchmarks.cases.llm.packed import WEIGHTS, random_matrix
from benchmarks.cases.llm.shared import WIDTH
from benchmarks.cases.llm.work import SHAPES
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import NO_TIME, Budget, reason, say
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row, at
from benchmarks.harness.table import finish, result_table
from fullstride.errors import one_of
from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.cuda import skinny_product
from fullstride.llm.kernels.cuda.packed_product import packed_product
from fullstride.llm.kernels.cuda.target import HOPPER, Target, capability_of, target_of
from fullstride.llm.kernels.xla.kernels import project
from fullstride.llm.packed.formats import FORMATS
from fullstride.llm.packed.matrix import PackedMatrix
from fullstride.measure.roofline import roofline_bound
from fullstride.measure.timing import HostClock, Timing, TimingPlan, measure

# Relative error against fp64, by the dtype of the result; bf16 has eight bits.
TOLERANCE = {"bfloat16": 2**-8, "float32": 2e-5}
# By platform: bytes of a program's matrices, several times what a cache holds, and of matrices at most.
BYTES, MOST = {"cpu": 256 << 20, "cuda": 1_200_000_000}, 128
CHECKED = 512  # outputs that are compared with fp64
BF16, SKINNY = "bfloat16", "skinny_product"
Weight = jax.Array | PackedMatrix
Product = Callable[..., jax.Array]  # see `fullstride.llm.kernels.interface.Project`


def run(options: ProductsOptions, out: Path) -> Path:
    """Check, measure, print the table and write the JSON; return its path.

    ConfigError for an unknown format. GateError if a product is not that of fp64 or fails; the others are measured and
    written before.
    """
    for form in options.formats:
        one_of("--formats", form, FORMATS)
    device, budget = jax.devices()[0], Budget.of(options.seconds)
    place, target = "cpu" if device.platform == "cpu" else "cuda", target_of(capability_of(device))
    ways, ceilings = _ways(target, options.formats or tuple(FORMATS)), jax_ceilings(BF16)
    rows, gate, wrong, left_out = list[Row](), dict[str, float](), list[str](), list[dict[str, str]]()
    if target is None:
        left_out.append({"name": SKINNY, "why": "expected an NVIDIA GPU of compute capability 8.0 or newer"})
    for matrix, (outputs, inputs) in matrices_of(SHAPES[options.model]).items():
        for kind, own in ways.items():
            if budget.spent:
                left_out.append({"name": f"{matrix}: {kind}", "why": NO_TIME})
                continue
            weights = _weights(kind, (outputs, inputs), options.seed, BYTES[place], tiled=target is not None)
            for count, (way, call) in ((count, each) for count in options.rows for each in own.items()):
                name = f"{matrix}, {_plural(count)}: {way}"
                if way.startswith(SKINNY) and count > skinny_product.MOST_ROWS:
                    left_out.append({"name": name, "why": f"expected at most {skinny_product.MOST_ROWS} rows"})
                    continue
                say(name)
                bench = Bench(call, weights, count, options.seed, "float32" if matrix == "head" else BF16)
                try:
                    error = bench.error()
                    key = f"{way}, {bench.dtype}"
                    gate[key] = max(gate.get(key, 0.0), error)
                    if not error <= TOLERANCE[bench.dtype]:
                        limit = f"expected at most {TOLERANCE[bench.dtype]:.2g}"
                        wrong.append(f"{name}: relative error {error:.2e} against fp64, {limit}; not timed")
                        continue
                    timing, calls = bench.timing(PROGRAM_MS[place])
                except Exception as broken:
                    wrong.append(f"{name}: {reason(broken)}")
                    continue
                size = weights[0].nbytes
                bound = roofline_bound(2 * count * outputs * inputs, size, ceilings)
                extra: dict[str, Any] = {"bytes": size, "calls": calls, "error": error}
                extra["gb_per_second"] = size / timing.median_ms / 1e6
                extra["share_of_copy_rate"] = bound.memory_ms / timing.median_ms
                rows.append(Row(name, timing, bound, extra))
    conditions = {
        "model": options.model,
        "precision": BF16,
        "seed": options.seed,
        "left_out": left_out,
        **at(rows=(options.rows, ROWS), formats=(options.formats, ()), seed=(options.seed, 0)),
    }
    result = CaseResult("llm-products", place, conditions, gate, ceilings, rows, environment())

    def shown() -> Iterator[Table | str]:
        yield result_table(result)
        for row in rows:
            rate, share = row.extra["gb_per_second"], row.extra["share_of_copy_rate"]
            yield f"{row.name}: {row.timing.median_ms * 1e3:.1f} us, {rate:.0f} GB/s, {share:.0%} of the copy rate"
        yield from (f"{each['name']}: not run: {each['why']}" for each in left_out)

    return finish(result, out, shown, width=WIDTH, wrong=wrong)


def matrices_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the matrices of a decode step."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    return {
        "qkv": (heads + 2 * config.kv_heads * config.head_dim, hidden),
        "o": (hidden, heads),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (config.vocab_size, hidden),
    }


def _plural(count: int) -> str:
    return f"{count} row" + "s" * (count != 1)


def _ways(target: Target | None, formats: tuple[str, ...]) -> dict[str, dict[str, Product]]:
    """Return products by the kind of their weights and by name."""
    plain: dict[str, Product] = {"XLA": project}
    if target is not None:
        plain[SKINNY] = partial(skinny_product.project, target=target)
    if target is HOPPER:
        plain[f"{SKINNY} as for a100"] = partial(skinny_product.project, target=TARGETS["a100"])
    kernel = {} if target is None else {"packed": partial(packed_product, target=target)}
    return {BF16: plain, **{form: {form: partial(project, **kernel)} for form in formats}}


def _weights(kind: str, shape: tuple[int, int], seed: int, size: int, *, tiled: bool) -> list[Weight]:
    """Draw matrices of random weights, about `size` bytes in all."""
    packed = partial(random_matrix, kind, *shape, tiled=tiled)
    draw = jax.jit(packed if kind in FORMATS else lambda key: jax.random.normal(key, shape, BF16) * WEIGHTS)
    keys = jax.random.split(jax.random.key(seed), MOST)
    first = draw(keys[0])
    return [first, *map(draw, keys[1 : max(1, size // first.nbytes)])]


class Bench:
    """Program that multiplies rows by each of some matrices, over and over."""

    def __init__(self, call: Product, weights: list[Weight], rows: int, seed: int, dtype: str):
        """Compile it; its results have this dtype."""
        outputs, inputs = weights[0].shape
        keys = jax.random.split(jax.random.key(seed + 1), len(weights))
        self.dtype, self._weights = dtype, weights
        self._xs = [jax.random.normal(key, (rows, inputs), BF16) for key in keys]

        def program(times: int, xs: list[jax.Array], weights: list[Weight]) -> list[jax.Array]:
            def once(i: jax.Array, _: list[jax.Array]) -> list[jax.Array]:
                # XLA would compute what does not depend on the round only once.
                own, given, _ = lax.optimization_barrier((xs, weights, i))
                return [call(x, each, exact=dtype == "float32") for x, each in zip(own, given, strict=True)]

            return lax.fori_loop(0, times, once, [jnp.zeros((rows, outputs), dtype)] * len(weights))

        self._program = jax.jit(program)

    def error(self) -> float:
        """Return the relative error of some outputs of the last matrix."""
        found = self._program(1, self._xs, self._weights)[-1]
        weight = self._weights[-1]
        some = np.unique(np.linspace(0, weight.shape[0] - 1, CHECKED).astype(int))
        if isinstance(weight, PackedMatrix):
            # Tiles are for the kernel, whose sums are of exact numbers; without it they are rounded first.
            own = weight.rows(jnp.asarray(some), jnp.float32 if weight.tiled else BF16)
        else:
            own = weight[some]
        reference = np.asarray(self._xs[-1], np.float64) @ np.asarray(own, np.float64).T
        return float(np.linalg.norm(np.asarray(found, np.float64)[:, some] - reference) / np.linalg.norm(reference))

    def timing(self, wanted_ms: float) -> tuple[Timing, int]:
        """Time one product; also return the number of products in a run, which takes about `wanted_ms`."""

        def timing_of(times: int, plan: TimingPlan) -> Timing:
            return measure(
                lambda: jax.block_until_ready(self._program(times, self._xs, self._weights)), HostClock(), plan
            )

        times = max(1, round(wanted_ms / timing_of(1, GLANCE).median_ms))
        timing, calls = timing_of(times, PLAN), times * len(self._weights)
        return Timing(timing.first_ms, tuple(sample / calls for sample in timing.samples_ms), None), calls
