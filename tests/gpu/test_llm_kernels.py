"""The engine's CUDA kernels on a GPU: the checks of the emulator, at real sizes."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks.cases.llm.work import SHAPES
from fullstride.llm.kernels.cuda.sets import refusal
from fullstride.llm.kernels.interface import AttentionShape
from tests.llm.kernels import test_cuda_attention, test_layers
from tests.llm.kernels.test_token import BIASED, LLAMA, check

QWEN = replace(SHAPES["qwen3-0.6b"], layers=3)
PROCESSORS = 132


@pytest.fixture(autouse=True, scope="module")
def _hopper():
    if reason := refusal("paged", QWEN, "bfloat16", 16, jax.devices()[0]):
        pytest.skip(reason)


@pytest.mark.parametrize("lengths", [[100], [1500], [37, -1, 0, 1300], [900, 5, 64, 63, 65, 128, 127, 129], [250] * 16])
def test_a_step_of_qwen3(lengths):
    check(QWEN, lengths, PROCESSORS, width=200, steps=3)


@pytest.mark.parametrize("config", [LLAMA, BIASED], ids=["llama", "qwen2"])
def test_a_step_of_small_models(config):
    check(config, [37, -1, 0, 130], 20, steps=2)


@pytest.mark.parametrize("rows", [5, 32, 64, 100, 128])
def test_layers_of_qwen3_as_a_chain(rows):
    test_layers.check(QWEN, [int(n) for n in np.random.default_rng().integers(-1, 700, rows)], width=90)


@pytest.mark.parametrize("config", [test_layers.LLAMA, test_layers.BIASED], ids=["llama", "qwen2"])
def test_layers_of_small_models_as_a_chain(config):
    test_layers.check(config, [37, -1, 0, 80] * 10)


@pytest.mark.parametrize("kept", [test_cuda_attention.bf16, test_cuda_attention.e4m3])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block"), [(16, 8, 128, 16), (9, 3, 64, 16), (7, 1, 128, 8)])
def test_attention_of_rows_and_tiles(heads, kv_heads, head_dim, block, kept):
    shape = AttentionShape(heads, kv_heads, head_dim, block, head_dim**-0.5, 1e-6)
    case = test_cuda_attention.Case(shape, [0, 700, -1, 2000, 33], [(0, 64), (500, 50)], 64, kept=kept)
    test_cuda_attention.check(case, norms=True)


def test_codes_of_every_size():
    test_cuda_attention.test_the_smallest_codes_count()
    test_cuda_attention.test_codes_stop_at_their_largest_number()
