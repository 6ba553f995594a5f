"""The product kernel, emulated, against fp64."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fullstride.llm.kernels.cuda.chain import ChainLaunch
from fullstride.llm.kernels.cuda.product import SQUARES, Product, ProductSizes, arranged, in_order, kernel, sizes, slabs
from tests.llm.kernels import emulation


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


def expected(product: Product, x, weight, norm, bias, old) -> np.ndarray:
    """In fp64 from the same bf16 operands."""
    x, weight, norm, bias, old = (a.astype(np.float64) for a in (x, weight, norm, bias, old))
    if product.eps is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + product.eps) * norm
    y = x @ weight.T
    if product.gated:
        gate, up = np.split(y, 2, -1)
        return gate / (1 + np.exp(-gate)) * up
    return y + bias * product.bias + old * product.residual


def check(product: Product, division: ProductSizes | None = None, seed: int = 0) -> None:
    rng = np.random.default_rng()
    found = division or sizes(product)
    assert found is not None
    x = bf16(rng.standard_normal((product.rows, product.inputs)) * rng.uniform(0.5, 30, (product.rows, 1)))
    weight = bf16(rng.standard_normal((product.outputs, product.inputs)) * product.inputs**-0.5)
    norm, bias = bf16(rng.uniform(0.5, 1.5, product.inputs)), bf16(rng.standard_normal(product.outputs))
    after = bf16(rng.uniform(0.5, 1.5, product.outputs))
    old = bf16(rng.standard_normal((product.rows, product.outputs // (1 + product.gated))))
    given = bf16(x.astype(np.float32) * norm.astype(np.float32)) if product.eps is not None else x
    squares = (x.astype(np.float32) ** 2).reshape(product.rows, -1, SQUARES).sum(-1)
    given = np.asarray(arranged(jnp.asarray(given)))
    operands, aliases = [given, weight, squares, bias, after, old], {5: 0} if product.residual else {}
    made, grid = kernel(product, found)
    link = ChainLaunch(made, grid, tuple((i, 0) for i in (0, 1, 2, 3, 4, 6, 7, 8)))
    parts = np.empty((product.rows, -(-product.outputs // SQUARES)), np.float32)
    ordered = np.empty((slabs(product.rows) * 64, old.shape[1]), ml_dtypes.bfloat16)
    first = ordered if product.gated else old
    out, scaled, own = emulation.run_chain([link], operands, [first, ordered, parts], aliases, seed=seed)
    out = np.asarray(in_order(jnp.asarray(out), product.rows)) if product.gated else out
    near(out, expected(product, x, weight, norm, bias, old), 3 if product.gated else 1)
    if product.residual:
        scaled = np.asarray(in_order(jnp.asarray(scaled), product.rows))
        np.testing.assert_array_equal(scaled, bf16(out.astype(np.float32) * after.astype(np.float32)))
        np.testing.assert_allclose(own.sum(1), (out.astype(np.float64) ** 2).sum(1), rtol=1e-5)


def near(got: np.ndarray, want: np.ndarray, roundings: int) -> None:
    """Operands of the tensor cores are bf16, of a norm's result, too, which many terms average out to half a rounding.

    One rounds by up to 2^-8 of the number: the result, and before it gates and ups, all three of which may err alike.
    """
    error = np.abs(got.astype(np.float64) - want)
    assert error.max() < (roundings + 1) * 2**-8 * np.abs(want).max()
    assert error.mean() < 2**-9 * np.abs(want).mean() + 2**-9 * want.std()


@pytest.mark.parametrize("rows", [1, 19, 32, 50, 64, 97, 128])
def test_any_number_of_rows(rows):
    check(Product(rows, 256, 256, eps=1e-6))


@pytest.mark.parametrize(("tile", "cluster"), [(64, 1), (64, 8), (128, 2), (192, 4), (96, 2)])
def test_any_division(tile, cluster):
    check(Product(40, 1536, 384 if tile != 128 else 256), ProductSizes(tile, cluster))


@pytest.mark.parametrize("division", [None, ProductSizes(96, 8)], ids=["chosen", "few columns of few rows"])
def test_gates(division):
    check(Product(27, 512, 768, eps=1e-6, gated=True), division)


def test_biases():
    check(Product(21, 256, 192, bias=True))


@pytest.mark.parametrize(("tile", "cluster"), [(64, 8), (192, 2)])
def test_the_residual_stream_and_what_the_next_norm_needs(tile, cluster):
    check(Product(61, 1536, 384, residual=True), ProductSizes(tile, cluster))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_in_any_order_of_threads(seed):
    check(Product(64, 1024, 128, residual=True), ProductSizes(64, 4), seed)
