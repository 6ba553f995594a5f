"""The product kernel, emulated, against fp64."""

import ml_dtypes
import numpy as np
import pytest

from fullstride.llm.kernels.cuda.product import Product, Sizes, kernel, sizes
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


def check(product: Product, division: Sizes | None = None, seed: int = 0) -> None:
    rng = np.random.default_rng()
    found = division or sizes(product)
    assert found is not None
    x = bf16(rng.standard_normal((product.rows, product.inputs)) * rng.uniform(0.5, 30, (product.rows, 1)))
    weight = bf16(rng.standard_normal((product.outputs, product.inputs)) * product.inputs**-0.5)
    norm, bias = bf16(rng.uniform(0.5, 1.5, product.inputs)), bf16(rng.standard_normal(product.outputs))
    wide = product.outputs // (1 + product.gated)
    old = bf16(rng.standard_normal((product.rows, wide)))
    made, grid = kernel(product, found)
    out = np.zeros if product.residual else None
    operands = [x, weight, norm, bias] + [old] * (out is not None)
    aliases = {4: 0} if product.residual else {}
    link = emulation.Link(made, grid, tuple((i, 0) for i in (0, 1, 2, 3, len(operands))))
    shapes = [np.empty((product.rows, wide), ml_dtypes.bfloat16)]
    got = emulation.run_chain([link], operands, shapes, aliases, seed=seed)[0].astype(np.float64)
    want = expected(product, x, weight, norm, bias, old)
    # Operands of the tensor cores are bf16: of a norm's result, too, and of gates and ups.
    assert np.abs(got - want).max() < 2**-7 * np.abs(want).max()
    assert np.abs(got - want).mean() < 2**-9 * np.abs(want).mean() + 2**-9 * np.abs(want).std()


@pytest.mark.parametrize("rows", [1, 19, 32, 50, 64, 97, 128])
def test_any_number_of_rows(rows):
    check(Product(rows, 256, 256, eps=1e-6))


@pytest.mark.parametrize("tile", [64, 128, 192])
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_any_division(tile, cluster):
    check(Product(40, 512, 384 if tile != 128 else 256), Sizes(tile, cluster, 512 // cluster // 64 + 1, tile // 64))


@pytest.mark.parametrize("stages", [3, 4])
def test_a_ring_shorter_than_the_slice(stages):
    check(Product(33, 1024, 128, eps=1e-5), Sizes(128, 2, stages, 4))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_that_share_the_inputs(groups):
    check(Product(64 if groups > 1 else 60, 512, 64, residual=True), Sizes(64, 2, 5, groups))


def test_gates():
    check(Product(37, 512, 768, eps=1e-6, gated=True))


def test_biases_and_residuals():
    check(Product(21, 256, 192, bias=True, residual=True))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_in_any_order_of_threads(seed):
    check(Product(64, 512, 128, eps=1e-6), Sizes(64, 4, 3, 2), seed)
