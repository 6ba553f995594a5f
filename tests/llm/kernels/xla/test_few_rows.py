from typing import Any

import jax
import numpy as np
import pytest

from fullstride.llm.kernels.xla.few_rows import FEW, dot


@pytest.mark.parametrize("rows", [1, 2, 7, 16, FEW, FEW + 1])
def test_a_product_of_few_rows_is_that_of_float64(seed, rows):
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((rows, 53), np.float32), rng.standard_normal((71, 53), np.float32)
    found = np.asarray(jax.jit(dot, static_argnums=2)(x, weight, "float32"))
    np.testing.assert_allclose(found, x.astype(np.float64) @ weight.T, atol=2e-5)


def test_the_form_is_the_one_that_is_fast():
    """In the program, both transpositions are outside of the product."""
    operands = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8, 64), (96, 64)))
    text: Any = jax.jit(dot, static_argnums=2).lower(*operands, "float32").compile().as_text()
    assert "f32[96,8]{1,0} dot(" in text or "f32[96,8]{1,0} fusion(" in text
