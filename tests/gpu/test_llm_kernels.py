"""The engine's CUDA kernels on a GPU: the checks of the emulator, at real sizes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases.llm.work import SHAPES
from fullstride.llm.kernels.cuda.packed_product import packed_product
from fullstride.llm.kernels.cuda.skinny_product import project
from fullstride.llm.kernels.cuda.target import HOPPER, Target, capability_of, target_of
from fullstride.llm.kernels.interface import AttentionShape
from fullstride.llm.packed.formats import FORMATS
from fullstride.llm.packed.matrix import numbers
from tests.llm.kernels import test_cuda_attention, test_layers, test_skinny_product
from tests.llm.kernels.test_token import BIASED, LLAMA, check
from tests.llm.packed.test_formats import packed, random_rows

QWEN = replace(SHAPES["qwen3-0.6b"], layers=3)
PROCESSORS = 132


def own() -> Target:
    """Return this GPU; skip if no kernel is made for it."""
    found = target_of(capability_of(jax.devices()[0]))
    if found is None:
        pytest.skip("no NVIDIA GPU of compute capability 8.0 or newer")
    return found


@pytest.fixture(params=["own", "least"])
def target(request) -> Target:
    """Return this GPU, and one with fewer instructions and less shared memory, as which it can be used."""
    found = own()
    return found if request.param == "own" else Target(found.capability, "80", clusters=False, shared=99 << 10)


@pytest.fixture
def hopper() -> None:
    if own() is not HOPPER:
        pytest.skip("these kernels need a GPU of compute capability 9.0")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("lengths", [[100], [1500], [37, -1, 0, 1300], [900, 5, 64, 63, 65, 128, 127, 129], [250] * 16])
def test_a_step_of_qwen3(lengths):
    check(QWEN, lengths, PROCESSORS, width=200, steps=3)


# The copy engine once overtook loads of weights, in few steps and by a little.
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_step_of_qwen3_is_the_same_each_time(rows):
    check(replace(QWEN, vocab_size=4096, layers=12), [100] * rows, PROCESSORS, again=80)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("config", [LLAMA, BIASED], ids=["llama", "qwen2"])
def test_a_step_of_small_models(config):
    check(config, [37, -1, 0, 130], 20, steps=2)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [5, 32, 64, 100, 128])
def test_layers_of_qwen3_as_a_chain(rows):
    test_layers.check(QWEN, [int(n) for n in np.random.default_rng().integers(-1, 700, rows)], width=90)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [5, 64])
def test_layers_with_an_fp8_cache_as_a_chain(rows):
    lengths = [int(n) for n in np.random.default_rng().integers(-1, 700, rows)]
    test_layers.check(QWEN, lengths, width=90, fp8=True)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("config", [test_layers.LLAMA, test_layers.BIASED], ids=["llama", "qwen2"])
def test_layers_of_small_models_as_a_chain(config):
    test_layers.check(config, [37, -1, 0, 80] * 10)


@pytest.mark.parametrize("kept", [test_cuda_attention.bf16, test_cuda_attention.e4m3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block"),
    [(16, 8, 128, 16), (9, 3, 64, 16), (7, 1, 128, 8), (3, 1, 96, 16), (8, 2, 256, 16)],
)
def test_attention_of_rows_and_tiles(heads, kv_heads, head_dim, block, kept, target):
    shape = AttentionShape(heads, kv_heads, head_dim, block, head_dim**-0.5, 1e-6)
    tiles = [(0, 64), (500, 50)]
    case = test_cuda_attention.Case(shape, [0, 700, -1, 2000, 33], tiles, 64, kept=kept, target=target)
    test_cuda_attention.check(case, norms=True)


@pytest.mark.parametrize("changes", [{"window": 100}, {"window": 1024, "cap": 5.0}, {"cap": 30.0}], ids=str)
def test_windows_caps_and_sinks(changes, target):
    shape = AttentionShape(8, 2, 64, 16, 0.3, 1e-6, **changes)
    tiles = [(0, 64), (1500, 50)]
    case = test_cuda_attention.Case(shape, [0, 700, -1, 2000, 33], tiles, 64, sinks=True, target=target)
    test_cuda_attention.check(case, norms=True)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 1024, 4096), (4, 2048, 1024), (16, 1024, 6144), (11, 12288, 4098)]
)
def test_products_of_few_rows(rows, inputs, outputs, target):
    given = test_skinny_product.operands(rows, inputs, outputs)
    x, weight, norm, bias, residual = (jax.numpy.asarray(each) for each in given.values())
    options = {"norm": (norm, test_skinny_product.EPS), "bias": bias, "residual": residual}
    got = jax.jit(lambda x, w: project(x, w, target=target, **options))(x, weight)
    test_skinny_product.near(np.asarray(got), test_skinny_product.expected(given), 3)


def test_codes_of_every_size():
    own()
    test_cuda_attention.test_the_smallest_codes_count()
    test_cuda_attention.test_scales_end_where_bf16_times_a_power_of_two_does()
    for size, outlier in ((1.0, 50.0), (1e-4, 50.0), (1e4, 1.0)):
        test_cuda_attention.test_keys_and_values_of_any_size_are_as_precise_as_codes(size, outlier, seed=0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 9, 40, 64])
def test_products_with_packed_matrices(form, rows, target):
    """Distances from fp64 of the format's numbers are those of sums in fp32."""
    rng = np.random.default_rng()
    matrix = packed(random_rows(form, 4096 + 48, 2048, rng), True)
    x = jnp.asarray(rng.standard_normal((rows, 2048)), jnp.bfloat16)
    found = jax.jit(partial(packed_product, kind=jnp.float32, target=target))(x, matrix)
    weight = np.asarray(numbers(matrix, jnp.float32), np.float64)
    exact = np.asarray(x, np.float64) @ weight.T
    assert np.abs(np.asarray(found) - exact).max() < 2e-5 * np.abs(exact).max()
