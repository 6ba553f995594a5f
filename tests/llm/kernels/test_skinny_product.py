"""The kernel for products of few rows, emulated, against fp64."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fullstride.llm.kernels.cuda import skinny_product
from fullstride.llm.kernels.cuda.skinny_product import MOST_ROWS, OUTS, SkinnyProduct, kernel, project
from fullstride.llm.kernels.cuda.target import HOPPER
from fullstride.llm.kernels.xla import kernels as xla
from tests.llm.kernels.emulation import run, seeded

EPS = 1e-5


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


def operands(rows: int, inputs: int, outputs: int, gated: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng()
    x = rng.standard_normal((rows, inputs * (1 + gated))) * rng.uniform(0.5, 30, (rows, 1))
    made = {
        "x": x,
        "weight": rng.standard_normal((outputs, inputs)) * inputs**-0.5,
        "norm": rng.uniform(0.5, 1.5, inputs),
        "bias": rng.standard_normal(outputs),
        "residual": rng.standard_normal((rows, outputs)),
    }
    return {name: bf16(value) for name, value in made.items()}


def expected(given: dict[str, Any], gated: bool = False) -> np.ndarray:
    """In fp64 from the same bf16 operands, as far as they are given."""
    x, weight, norm, bias, residual = (given.get(name) for name in ("x", "weight", "norm", "bias", "residual"))
    assert x is not None
    assert weight is not None
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    if norm is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * norm.astype(np.float64)
    if gated:
        gate, up = np.split(x, 2, -1)
        x = gate / (1 + np.exp(-gate)) * up
    y = x @ weight.T
    return y + sum(np.asarray(each, np.float64) for each in (bias, residual) if each is not None)


def near(got: np.ndarray, want: np.ndarray, roundings: float) -> None:
    """A rounding to bf16 errs by up to 2^-9 of the number; those of the operands are averaged out by many terms."""
    assert np.abs(got.astype(np.float64) - want).max() < roundings * 2**-9 * np.abs(want).max()


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "parts", "exact"),
    [
        (3, 96, 34, ("bias",), True),
        (16, 544, 130, ("norm", "bias", "residual"), False),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in [
                (1, 256, 200, ("norm",), True),
                (8, 1056, 64, ("norm", "bias"), False),
                (9, 32, 8, ("residual",), True),
            ]
        ),
    ],
)
def test_sums_are_those_of_fp64(rows, inputs, outputs, parts, exact):
    given = operands(rows, inputs, outputs)
    own = {name: given[name] for name in ("x", "weight", *parts)}
    options: dict[str, Any] = {name: jnp.asarray(given[name]) for name in parts if name != "norm"}
    if "norm" in parts:
        options["norm"] = (jnp.asarray(given["norm"]), EPS)
    with seeded(rows):
        got = jax.jit(lambda x, w: project(x, w, exact=exact, **options))(given["x"], given["weight"])
    assert got.dtype == (jnp.float32 if exact else jnp.bfloat16)
    # The sums of exact results are fp32; a norm rounds its results before they are multiplied.
    near(np.asarray(got), expected(own), 0.01 if exact and parts == ("bias",) else 3)


@pytest.mark.thorough
def test_gates_are_applied_first():
    given = operands(5, 128, 40, gated=True)
    residual = jnp.asarray(given["residual"])
    got = np.asarray(jax.jit(lambda x, w: project(x, w, gated=True, residual=residual))(given["x"], given["weight"]))
    near(got, expected({name: given[name] for name in ("x", "weight", "residual")}, gated=True), 4)


@pytest.mark.parametrize("outs", [OUTS[0], *(pytest.param(n, marks=pytest.mark.thorough) for n in OUTS[1:])])
def test_any_number_of_outputs_of_a_block(outs):
    """In any order of threads, and with more chunks than a ring holds; the result's memory is NaN before."""
    given = operands(7, 2336, 72)
    made, grid = kernel(SkinnyProduct(7, 2336, 72, eps=EPS, residual=True), HOPPER, outs)
    empty = np.zeros(0, ml_dtypes.bfloat16)
    arrays = [given["x"], given["weight"], given["norm"], empty, given["residual"]]
    found = [run(made, grid, arrays, [jax.ShapeDtypeStruct((7, 72), jnp.bfloat16)], seed=n)[0] for n in (1, 2)]
    near(found[0], expected({name: given[name] for name in ("x", "weight", "norm", "residual")}), 3)
    np.testing.assert_array_equal(found[0], found[1])


def test_other_products_are_xlas(monkeypatch):
    monkeypatch.setattr(skinny_product, "call", lambda *_: pytest.fail("the kernel was called"))
    for rows, inputs, outputs, dtype in (
        (MOST_ROWS + 1, 64, 64, "bfloat16"),
        (2, 72, 64, "bfloat16"),
        (2, 64, 63, "bfloat16"),
        (2, 64, 64, "float32"),
    ):
        given = operands(rows, inputs, outputs)
        x, weight, norm = (jnp.asarray(given[name], dtype) for name in ("x", "weight", "norm"))
        own, theirs = (each(x, weight, norm=(norm, EPS)) for each in (project, xla.project))
        np.testing.assert_array_equal(own, theirs)
