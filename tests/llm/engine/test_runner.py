import re
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks.cases.llm.work import RandomParameters
from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import EngineConfig
from fullstride.llm.engine import runner as runner_module
from fullstride.llm.engine.programs import Programs
from fullstride.llm.engine.runner import Runner
from fullstride.llm.engine.shapes import choose_shapes
from fullstride.llm.engine.speculative_config import SpeculativeConfig
from fullstride.llm.engine.wire import PARAMS, DecodeInput, MixedInput, RowParams
from fullstride.llm.kernels.xla.kernels import plain
from fullstride.llm.models.parameters import put
from tests.llm.engine.conftest import run
from tests.llm.engine.test_engine import greedy


def large_arrays(hlo: str, elements: int) -> list[str]:
    """Names of the operations whose result, or a part of it, has as many elements or more."""
    found = []
    for line in hlo.splitlines():
        if made := re.match(r"\s*(?:ROOT )?\S+ = (\(.*?\)|\S+) ([\w-]+)\(", line):
            shapes = re.findall(r"\[([\d,]+)\]", made[1])
            if any(np.prod([int(n) for n in shape.split(",")]) >= elements for shape in shapes):
                found.append(made[2])
    return found


def test_progress_comes_before_the_first_program_and_while_none_is_ready(monkeypatch):
    class Lowered:
        def __init__(self, key):
            self.key = key

        def compile(self, options):
            assert enough.wait(60)
            return f"compiled {self.key}"

    def progress(done: int, total: int, cached: int | None) -> None:
        assert cached is None
        calls.append((done, total))
        if len(calls) > 3:
            enough.set()

    calls: list[tuple[int, int]] = []
    enough, keys = threading.Event(), [("decode", rows, 0, 1) for rows in range(3)]
    runner = Runner.__new__(Runner)
    runner.device, runner._cache = jax.devices()[0], None
    monkeypatch.setattr(runner_module, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(Runner, "keys", lambda self: keys)
    monkeypatch.setattr(Runner, "lower", lambda self, key: Lowered(key))
    assert runner._compile(progress) == {key: f"compiled {key}" for key in keys}
    assert calls[:4] == [(0, 3)] * 4
    assert calls == sorted(calls)
    assert calls[-1] == (3, 3)


# All queries share one key head.
ONE_HEAD = ModelConfig("qwen3", 203, 64, 96, 2, 8, 1, 16, 256, tied=True, qk_norm=True, dtype="float32")


@pytest.fixture(scope="module")
def large(request, qwen3) -> Runner:
    """A pool that is larger than anything else by far, and the two kinds of programs for it."""
    kernels, device = plain(dynamic=True), jax.devices()[0]
    model, parameters = qwen3.config, qwen3.parameters
    if request.param == "one key head":
        model, parameters = ONE_HEAD, RandomParameters(ONE_HEAD, "float32")
    config = EngineConfig(max_sequences=1, max_tokens_per_step=32, kv_blocks=4000)
    if request.param == "drafts":
        config = replace(config, speculative_config=SpeculativeConfig())
    if request.param == "fp8":
        config = replace(config, kv_cache_dtype="fp8", kv_blocks=16000)
    made = choose_shapes(config, model, kernels, device)
    runner = Runner.__new__(Runner)
    runner.programs, runner.sizes, runner.device = Programs(model, kernels, made), made, device
    runner.mesh = None
    runner._leaves, runner._tree = jax.tree.flatten(put(model, parameters, "float32", device))
    runner.state = runner._blank()
    return runner


KEYS = ("mixed", 1, 1, 16), ("decode", 1, 0, 16), ("quick_decode", 1, 0, 16)


@pytest.mark.parametrize(
    ("large", "key"),
    [
        ("qwen3", KEYS[0]),
        pytest.param("qwen3", KEYS[1], marks=pytest.mark.thorough),
        ("qwen3", KEYS[2]),
        ("one key head", KEYS[0]),
        ("drafts", ("quick_verify", 1, 0, 16)),
        pytest.param("drafts", ("verify", 1, 0, 16), marks=pytest.mark.thorough),
        ("fp8", KEYS[1]),
        *(pytest.param("one key head", key, marks=pytest.mark.thorough) for key in KEYS[1:]),
        *(pytest.param("fp8", key, marks=pytest.mark.thorough) for key in KEYS[::2]),
    ],
    indirect=["large"],
)
def test_the_pool_is_written_where_it_lies(large, key):
    """On the optimised program: nothing as large as one layer's keys is copied, cut out or put together."""
    compiled = large.lower(key).compile()
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(large.state))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= state
    layer = large.state.pool[0, 0]
    assert memory.temp_size_in_bytes < layer.nbytes
    found = set(large_arrays(compiled.as_text(), layer.size))
    assert "parameter" in found
    # A fusion of that size is a scatter into the buffer that it is given: temporaries have no room for another.
    passing = {"parameter", "bitcast", "while", "call", "tuple", "get-tuple-element", "conditional"}
    assert found <= passing | {"dynamic-update-slice", "scatter", "fusion"}


def test_a_dispatch_keeps_every_buffer_where_it_was(engine):
    # The first step takes over what the host made.
    run(engine, ([5, 6, 7], greedy(9)))
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine._runner.state)]
    run(engine, ([5, 6, 7], greedy(9)), ([9] * 40, greedy(3, repetition_penalty=1.1)))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine._runner.state)] == before


def test_parts_of_a_packed_array_are_all_of_it():
    mixed = np.zeros(MixedInput.size(3, 2, 5, 7), np.int32)
    decode = np.zeros(DecodeInput.size(3, 7), np.int32)
    for packed, parts in ((mixed, MixedInput.of(mixed, 3, 2, 5)), (decode, DecodeInput.of(decode, 3))):
        for part in parts:
            part += 1
        assert (packed == 1).all()
    words = np.zeros(MixedInput.of(mixed, 3, 2, 5).params.shape[1], np.int32)
    PARAMS.put(words, **dict.fromkeys(RowParams._fields, 1))
    assert (words == 1).all()


def test_the_grid_holds_every_plan(qwen3):
    class Device:
        platform = "cpu"

    config = EngineConfig(max_sequences=20, max_tokens_per_step=500, max_length=250, kv_memory=1 << 20)
    made = choose_shapes(config, qwen3.config, plain(dynamic=True), Device())
    assert made.row_buckets == (1, 8, 20)
    assert made.tile_buckets == (2, 8, 15)
    assert made.widths == (16,)
    assert made.blocks == (1 << 20) // (2 * 2 * 2 * 16 * 16 * 4) - 1
    assert made.max_length == 250
    many = choose_shapes(EngineConfig(max_sequences=300), qwen3.config, plain(dynamic=True), Device())
    assert (many.budget, many.tile_buckets[-1]) == (332, 10)
    codes = choose_shapes(replace(config, kv_cache_dtype="fp8"), qwen3.config, plain(dynamic=True), Device())
    # A byte each instead of the four of float32, two for each head of 16, and one block is nobody's.
    assert (codes.blocks + 1, codes.dtype, codes.pool) == (4 * (made.blocks + 1) * 16 // 18, "float32", "uint8")
    with pytest.raises(ConfigError, match="max_tokens_per_step=20: expected more than max_sequences, which is 20"):
        choose_shapes(
            EngineConfig(max_sequences=20, max_tokens_per_step=20), qwen3.config, plain(dynamic=True), Device()
        )
    assert choose_shapes(EngineConfig(kv_blocks=3), qwen3.config, plain(dynamic=True), Device()).max_length == 49
