"""The product with packed matrices, emulated, against fp64 of the numbers of its format."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fullstride.llm.kernels.cuda.packed_product import (
    Division,
    PackedProduct,
    division,
    kernel,
    packed_product,
)
from fullstride.llm.kernels.cuda.target import HOPPER, LEAST_SHARED, target_of
from fullstride.llm.packed.formats import FORMATS
from fullstride.llm.packed.matrix import numbers
from tests.llm.kernels import emulation
from tests.llm.packed.test_formats import packed, random_rows


def check(form: str, rows: int, outputs: int, inputs: int, own: Division | None = None, seed: int = 0) -> None:
    """Compare with fp64; a product's error may be that of sums in fp32."""
    rng = np.random.default_rng()
    matrix = packed(random_rows(form, outputs, inputs, rng), True)
    x = (rng.standard_normal((rows, inputs)) * rng.uniform(0.5, 30, (rows, 1))).astype(ml_dtypes.bfloat16)
    asked = PackedProduct(rows, inputs, outputs, form)
    made, grid = kernel(asked, own or division(asked))
    result = jax.ShapeDtypeStruct((grid[1], rows, outputs), jnp.float32)
    operands = [x, np.asarray(matrix.codes), np.asarray(matrix.records)]
    (parts,) = emulation.run(made, grid, operands, [result], seed=seed)
    weight = np.asarray(numbers(matrix, jnp.float32), np.float64)
    exact = x.astype(np.float64) @ weight.T
    # What fp32 sums may be off by, of what is summed: codes with minima have 128 more until the end.
    summed = np.abs(x.astype(np.float64)) @ np.abs(weight).T
    bound = 2**-24 * np.sqrt(inputs) * summed * (32 if FORMATS[form].minima else 2)
    error = np.abs(parts.astype(np.float64).sum(0) - exact)
    assert (error <= bound).all(), (error / bound).max()
    assert np.abs(exact).max() > 100 * error.max()


# Every format, any number of rows, one and two tiles of a warp, one and several shares of the inputs.
CASES = [
    ("Q4_K", 8, Division(1, 1, 2, 2)),
    ("Q6_K", 17, Division(4, 1, 4)),
    ("int4_128", 2, Division(1, 2, 1)),
    ("fp8_128", 16, Division(2, 2, 4)),
]
MORE = [
    ("Q4_0", 1, Division(1, 1, 1)),
    ("Q4_1", 11, Division(2, 1, 2, 2)),
    ("Q8_0", 3, Division(1, 2, 8)),
    ("fp8", 5, Division(1, 1, 1)),
    ("int4_32", 33, Division(8, 1, 8, 2)),
]


@pytest.mark.parametrize(
    ("form", "rows", "own"), [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE)]
)
def test_products_of_every_format(form, rows, own):
    # Outputs that the last block has too few of, and inputs that rounds of warps do not divide.
    check(form, rows, 48, 1280 if own.n_tiles < 4 else 512, own)


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_chosen_divisions(form, rows):
    check(form, rows, 160, 1536)


@pytest.mark.parametrize("seed", [1, 2])
def test_in_any_order_of_threads(seed):
    check("Q4_K", 12, 64, 768, Division(2, 1, 2), seed)


def test_more_rows_take_more_launches_and_many_are_unpacked():
    rng = np.random.default_rng()
    matrix = packed(random_rows("Q8_0", 16, 128, rng), True)
    weight = np.asarray(numbers(matrix, jnp.float32), np.float64)
    for rows in (70, 300):
        x = jnp.asarray(rng.standard_normal((rows, 128)), jnp.bfloat16)
        text = jax.jit(packed_product, static_argnums=2).lower(x, matrix, jnp.bfloat16).as_text()
        assert ("callback" in text) == (rows == 70)
        exact = np.asarray(x, np.float64) @ weight.T
        found = np.asarray(jax.jit(packed_product, static_argnums=2)(x, matrix, jnp.bfloat16), np.float64)
        assert np.abs(found - exact).max() < 2**-7 * np.abs(exact).max()


def test_divisions_keep_the_memory_busy():
    """Qwen3-8B's products: about as many blocks as multiprocessors, two of which fit into one."""
    for outputs, inputs in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)):
        for rows in (1, 16, 64):
            asked = PackedProduct(rows, inputs, outputs, "Q4_K")
            made, grid = kernel(asked, division(asked))
            assert grid[0] * grid[1] >= 128
            assert made.shared <= HOPPER.shared // 2
            older = kernel(asked, division(asked), target_of("8.9"))[0]  # pyright: ignore[reportArgumentType]
            assert older.shared <= LEAST_SHARED
