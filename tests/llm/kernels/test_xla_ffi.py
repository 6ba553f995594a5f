"""XLA's calls of functions of Python, on the CPU, whose calls have the same form."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fullstride.llm.kernels.cuda import xla_ffi

TARGET = "fullstride_test_call"
seen: list[str] = []


def floats(pointer: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (count,))


def difference(call: xla_ffi.FfiCall) -> None:
    seen.append(call.name)
    if call.name == "refuse":
        raise ValueError("seven is no number")
    first, second, minus, twice = call.pointers
    floats(minus, 5)[:] = floats(first, 5) - floats(second, 5)
    floats(twice, 5)[:] = 2 * floats(first, 5)


xla_ffi.register(TARGET, "cpu", difference)


def called(name: str):
    shapes = (jax.ShapeDtypeStruct((5,), jnp.float32),) * 2
    return jax.jit(lambda x, y: jax.ffi.ffi_call(TARGET, shapes)(x, y, name=name))


def test_operands_and_results_are_where_the_pointers_say():
    x, y = np.random.default_rng().standard_normal((2, 5)).astype(np.float32)
    minus, twice = called("one of many")(x, y)
    np.testing.assert_array_equal(minus, x - y)
    np.testing.assert_array_equal(twice, 2 * x)
    assert seen[-1] == "one of many"


def test_what_it_raises_is_the_computations_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: seven is no number"):
        jax.block_until_ready(called("refuse")(jnp.ones(5), jnp.ones(5)))


def test_a_cpu_has_no_stream():
    caught = []

    def ask(call: xla_ffi.FfiCall) -> None:
        try:
            call.stream()
        except RuntimeError as error:
            caught.append(str(error))

    xla_ffi.register(TARGET + "_stream", "cpu", ask)
    shape = jax.ShapeDtypeStruct((1,), jnp.float32)
    jax.block_until_ready(jax.jit(lambda x: jax.ffi.ffi_call(TARGET + "_stream", shape)(x, name="x"))(jnp.ones(1)))
    assert caught == ["XLA provided no CUDA stream"]
