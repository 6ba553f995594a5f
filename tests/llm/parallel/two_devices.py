"""Needs two devices: see `test_parallel.py`. The engine's own tests, and what only several devices can do wrong."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import PartitionSpec

import tests.llm.kernels.emulation  # noqa: F401 # lowers kernels for a CPU
from benchmarks.cases.llm import devices as bench_devices
from benchmarks.cases.llm import parallel as bench_parallel
from benchmarks.cases.llm import replicas as bench_replicas
from benchmarks.cases.llm.devices import MadeParameters
from benchmarks.cases.llm.packed import PackedNumbers, StoredParameters
from benchmarks.cases.llm.parallel import steps
from benchmarks.cases.llm.shared import LlmBench
from benchmarks.cases.llm.sweep import weight_count
from benchmarks.cases.llm.work import SHAPES, RandomParameters, TiledParameters
from benchmarks.harness.results import CaseResult, read_result, write_result
from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.programs import Programs
from fullstride.llm.engine.runner import Runner
from fullstride.llm.engine.shapes import choose_shapes
from fullstride.llm.kernels.cuda.sets import made
from fullstride.llm.kernels.interface import AXIS, Kernels, StepBatch
from fullstride.llm.kernels.xla.kernels import plain
from fullstride.llm.models import rope
from fullstride.llm.models.decoder import hidden_states, logits
from fullstride.llm.models.packing import Packing
from fullstride.llm.models.parameters import put
from fullstride.llm.models.tensor_parallel import POOL, mesh_of
from fullstride.llm.server import launch as serving
from fullstride.llm.weights import load
from fullstride.measure.roofline import Ceilings
from tests.llm import reference
from tests.llm.engine.conftest import TIGHT, Costs, run
from tests.llm.engine.test_adapters import mixed, require_merged
from tests.llm.engine.test_engine import (  # noqa: F401 # tests, and their fixtures
    greedy,
    prompt,
    rng,
    test_a_step_that_fails_ends_its_own_requests_alone,
    test_greedy_tokens_are_those_of_transformers,
    test_logprobs_are_those_of_transformers,
    test_n_completions_share_the_prompt_and_differ,
    test_nothing_is_compiled_once_it_runs,
    test_penalties_survive_preemption,
    test_structured_output_keeps_to_its_grammar,
    test_the_same_tokens_however_a_request_is_run,
    theirs,
)
from tests.llm.engine.test_runner import large_arrays
from tests.llm.lora import ATTENTION, MLP, merged, save_adapter
from tests.llm.models.test_decoder import BLOCK, ERROR

# No device could have an even part of the vocabulary.
ODD = ModelConfig("qwen3", 203, 64, 96, 2, 8, 4, 16, 256, tied=True, qk_norm=True, dtype="float32")


def random_model(config: ModelConfig) -> Any:
    return SimpleNamespace(config=config, parameters=RandomParameters(config, config.dtype), tokenizer=None)


def all_logits(loaded: Any, ids: list[int], packing: Packing | None = None) -> np.ndarray:
    """Return the logits of every position: one row's whole prompt as a single tile, on two devices."""
    config, count = loaded.config, len(ids)
    table = 1 + np.arange(-(-count // BLOCK), dtype=np.int32)[::-1]
    positions = jnp.arange(count, dtype=jnp.int32)
    slots = jnp.asarray(table[np.arange(count) // BLOCK] * BLOCK + np.arange(count) % BLOCK, jnp.int32)
    angles = rope.angles(positions, rope.frequencies(config))
    none = jnp.zeros((0, len(table)), jnp.int32)
    batch = StepBatch(jnp.asarray(ids, jnp.int32), positions, slots, none, jnp.asarray(table[None]), *angles)
    pool = jnp.zeros((config.layers, 2, (len(table) + 1) * BLOCK, config.kv_heads, config.head_dim))
    return on_two_devices(loaded, plain(dynamic=False), batch, pool, BLOCK, packing)


def on_two_devices(
    loaded: Any, kernels: Kernels, batch: StepBatch, pool: jax.Array, block: int, packing: Packing | None = None
) -> np.ndarray:
    """Scores after each of the batch's tokens."""
    config, devices = loaded.config, jax.devices()
    weights = put(config, loaded.parameters, str(pool.dtype), *devices, packing=packing)
    kernels = kernels._replace(axis=AXIS)

    def scores(weights, pool):
        hidden, pool = hidden_states(config, kernels, weights, pool, batch, block)
        return logits(config, kernels, weights, hidden), pool

    specs = jax.tree.map(lambda x: x.sharding.spec, weights)
    whole, mesh = PartitionSpec(), mesh_of(devices)
    call = jax.shard_map(scores, mesh=mesh, in_specs=(specs, POOL), out_specs=(whole, POOL), check_vma=False)
    return np.asarray(jax.jit(call)(weights, pool)[0])


@pytest.mark.parametrize(
    "kind", ["tiny_qwen3", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("tiny_llama", "tiny_qwen2"))]
)
def test_logits_are_those_of_transformers(request, kind):
    folder = request.getfixturevalue(kind)
    ids = np.random.default_rng().integers(3, 320, 130).tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    found = all_logits(load(folder), ids)
    assert np.abs(found - expected).max() / np.abs(expected).max() < ERROR


def test_a_vocabulary_that_does_not_divide_ends_where_it_should():
    ids = np.random.default_rng().integers(0, 203, 40).tolist()
    loaded = random_model(ODD)
    expected, found = reference.logits(ODD, loaded.parameters, ids), all_logits(loaded, ids)
    assert found.shape == (40, 203)
    assert np.abs(found - expected).max() / np.abs(expected).max() < ERROR


@pytest.mark.parametrize("name", ["stored", pytest.param("int4", marks=pytest.mark.thorough)])
def test_packed_weights_are_split_by_whole_blocks(name):
    config = replace(ODD, hidden_size=256, heads=16, head_dim=32, intermediate_size=512)
    loaded = SimpleNamespace(config=config, parameters=StoredParameters(config, "float32"), tokenizer=None)
    ids = np.random.default_rng().integers(0, 203, 20).tolist()
    numbers = PackedNumbers(config, loaded.parameters, "float32", name)
    expected = reference.logits(config, {key: np.asarray(numbers[key]) for key in numbers}, ids)
    found = all_logits(loaded, ids, Packing(name))
    assert np.abs(found - expected).max() / np.abs(expected).max() < ERROR


def test_adapters_are_those_of_merged_weights(tiny_qwen3, tmp_path, rng):  # noqa: F811 # a fixture
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen3).eval()  # noqa: F811
    folders = {
        "wide": save_adapter(tmp_path / "wide", theirs, rng, rank=5, modules=ATTENTION + MLP),
        "thin": save_adapter(tmp_path / "thin", theirs, rng, rank=2, modules=("v_proj", "o_proj", "up_proj")),
    }
    small = replace(TIGHT, max_sequences=3, tensor_parallel_size=2, max_lora_rank=6)
    engine = Engine(load(tiny_qwen3), small, adapters=folders)
    ids = prompt(rng, 45)
    wide, plain, thin = mixed(engine, ids, ["wide", None, "thin"], greedy(9, logprobs=0, prompt_logprobs=0))
    require_merged(theirs, ids, plain)
    for name, found in {"wide": wide, "thin": thin}.items():
        require_merged(merged(theirs, folders[name]), ids, found)


@pytest.mark.thorough
def test_drafts_are_verified_on_both_devices(qwen3, shared, rng):  # noqa: F811 # a fixture
    drafts: Any = {"num_speculative_tokens": 3, "prompt_lookup_min": 1}
    drafting: Any = Engine(qwen3, replace(TIGHT, tensor_parallel_size=2, speculative_config=drafts))
    drafting._speculator.times = Costs(0.0)
    asked = [(prompt(rng, 5) * 4, greedy(40)) for _ in range(4)]
    assert [each.tokens for each in run(drafting, *asked)] == [each.tokens for each in run(shared, *asked)]
    assert drafting.stats().drafts > 10


def test_each_device_has_its_own_heads_and_never_the_whole(qwen3):
    config, read = qwen3.config, qwen3.parameters.read
    weights = put(config, qwen3.parameters, "float32", *jax.devices())
    query, key = config.heads * config.head_dim // 2, config.kv_heads * config.head_dim // 2
    inner = config.intermediate_size // 2
    for leaf in jax.tree.leaves(weights):
        split = leaf.sharding.spec != PartitionSpec()
        assert sum(shard.data.nbytes for shard in leaf.addressable_shards) == leaf.nbytes * (1 if split else 2)
    layer: Any = weights.layers[1]
    for i in range(2):
        rows = [slice(i * n, (i + 1) * n) for n in (query, key, key)]
        expected = [read(f"layers.1.{name}", part) for name, part in zip("qkv", rows, strict=True)]
        np.testing.assert_array_equal(layer.qkv.addressable_shards[i].data, np.concatenate(expected))
        part = slice(i * inner, (i + 1) * inner)
        expected = [read(f"layers.1.{name}", part) for name in ("gate", "up")]
        np.testing.assert_array_equal(layer.gate_up.addressable_shards[i].data, np.concatenate(expected))
        np.testing.assert_array_equal(layer.down.addressable_shards[i].data, read("layers.1.down", None, part))


def test_parameters_of_a_bench_are_the_same_in_parts():
    config = replace(SHAPES["qwen3-8b"], hidden_size=64, intermediate_size=96, layers=1, vocab_size=400)
    made = TiledParameters(config, "bfloat16")
    for name in ("embed", "layers.0.down"):
        np.testing.assert_array_equal(made.read(name, slice(3, 9), slice(5, 60)), made[name][3:9, 5:60])
    assert len({row.tobytes() for row in made["embed"]}) == 400


def test_the_pool_is_written_where_it_lies(qwen3):
    """On the optimised program of one device: its own part of the pool alone, in place, and two sums a layer."""
    kernels, devices = plain(dynamic=True)._replace(axis=AXIS), jax.devices()
    config = EngineConfig(max_sequences=1, max_tokens_per_step=32, kv_blocks=4000, tensor_parallel_size=2)
    made = choose_shapes(config, qwen3.config, kernels, *devices)
    runner = Runner.__new__(Runner)
    runner.programs, runner.sizes, runner.device = Programs(qwen3.config, kernels, made), made, devices[0]
    runner.mesh = mesh_of(devices)
    runner._leaves, runner._tree = jax.tree.flatten(put(qwen3.config, qwen3.parameters, "float32", *devices))
    runner.state = jax.jit(runner._blank, out_shardings=runner.places())()
    compiled = runner.lower(("decode", 1, 0, 16)).compile({"xla_cpu_use_fusion_emitters": True})
    memory = compiled.memory_analysis()
    state = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(runner.state)]
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in state)
    layer = state[0][0, 0]
    assert layer.shape == (4001 * 16, 1, 16)
    assert memory.temp_size_in_bytes < layer.nbytes
    found = set(large_arrays(compiled.as_text(), layer.size))
    passing = {"parameter", "bitcast", "while", "call", "tuple", "get-tuple-element", "conditional"}
    assert "parameter" in found
    assert found <= passing | {"dynamic-update-slice", "scatter", "fusion"}
    assert len(re.findall(r"all-reduce(?:-start)?\(", compiled.as_text())) == 2 * qwen3.config.layers + 1


def test_a_dispatch_keeps_every_buffer_where_it_was(engine):
    def pointers() -> list[int]:
        leaves = jax.tree.leaves(engine._runner.state)
        return [shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards]

    run(engine, ([5, 6, 7], greedy(9)))
    before = pointers()
    run(engine, ([5, 6, 7], greedy(9)), ([9] * 40, greedy(3, repetition_penalty=1.1)))
    assert pointers() == before


@pytest.mark.thorough
def test_a_pool_of_fp8_is_shared_as_any_other():
    loaded = random_model(replace(ODD, layers=1))
    config = replace(TIGHT, max_sequences=1, kv_cache_dtype="fp8")
    ids, params = np.random.default_rng().integers(0, 203, 60).tolist(), greedy(1, prompt_logprobs=0)
    both, told = Engine(loaded, replace(config, tensor_parallel_size=2)), []
    for engine in (both, Engine(loaded, config)):
        (found,) = run(engine, (ids, params))
        told.append([values[0].logprob for values in found.prompt_logprobs[1:]])
    pool = both._runner.state.pool
    assert [shard.data.nbytes for shard in pool.addressable_shards] == [pool.nbytes // 2] * 2
    # What is added in another order may fall on either side of the middle between two codes.
    assert np.abs(np.subtract(*told)).mean() < 0.02


def test_replicas_have_devices_of_their_own_and_one_compiler_of_grammars(qwen3, monkeypatch):
    class Recorded(Engine):
        def __init__(self, loaded, config, progress, devices, *, loading, adapters):
            self.devices, self.shares = devices, []

        def share_grammars(self, other):
            self.shares.append(other)

    monkeypatch.setattr(serving, "Engine", Recorded)
    made: list[Any] = serving.replicated(qwen3, EngineConfig(), 2, "m")
    assert [each.devices for each in made] == [[device] for device in jax.devices()]
    assert [each.shares for each in made] == [[], [made[0]]]


def test_an_engine_runs_on_the_device_that_it_is_given():
    small = replace(TIGHT, max_sequences=1, prefix_cache=False)
    other = Engine(random_model(replace(ODD, layers=1)), small, devices=jax.devices()[1:])
    tokens = run(other, ([5, 6, 7], greedy(9)))[0].tokens
    leaves = jax.tree.leaves((other._runner.state, other._runner._leaves))
    assert {device for leaf in leaves for device in leaf.devices()} == {jax.devices()[1]}
    assert tokens == run(other, ([5, 6, 7], greedy(9)))[0].tokens
    assert other.block_hashes(range(20)) == []


def test_an_engine_knows_which_beginnings_it_holds(engine, rng):  # noqa: F811 # a fixture
    ids = prompt(rng, 21)
    names = engine.block_hashes(ids)
    assert len(names) == 5
    assert engine.cached_prefix_blocks(names) == 0
    run(engine, (ids, greedy(9)))
    assert engine.cached_prefix_blocks(names) == 5
    assert engine.cached_prefix_blocks(engine.block_hashes(ids[:10] + [3] * 11)) == 2


def test_paged_kernels_serve_each_devices_heads():
    """Three rows in the middle of their sequences, of which the pool holds what no one made."""
    model = ModelConfig("qwen3", 200, 128, 128, 2, 4, 2, 64, 64, tied=True, qk_norm=True, dtype="bfloat16")
    loaded, length = random_model(model), jnp.asarray([9, 22, 1])
    tables = jnp.asarray([[3, 1, 0], [2, 5, 6], [4, 0, 0]], jnp.int32)
    slots = tables[jnp.arange(3), length // 8] * 8 + length % 8
    angles = rope.angles(length, rope.frequencies(model))
    batch = StepBatch(jnp.asarray([5, 150, 7]), length, slots, tables, jnp.zeros((0, 3), jnp.int32), *angles)
    pool = jax.random.normal(jax.random.key(0), (2, 2, 56, 2, 64), jnp.bfloat16)
    paged = made("paged", loaded.config, None)
    assert not isinstance(paged, str)
    found = [on_two_devices(loaded, kernels, batch, pool, 8) for kernels in (plain(dynamic=False), paged)]
    assert np.abs(found[0]).max() > 1
    assert np.abs(found[0] - found[1]).max() / np.abs(found[0]).max() < 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size=3: there are 2 devices"),
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size=0: expected 1 or more"),
        (
            {"tensor_parallel_size": 2, "kernels": "token"},
            r"kernels=token: .* tensor_parallel_size is 2",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Engine(random_model(ODD), EngineConfig(**changes))


def test_a_model_that_does_not_divide_says_what_would(qwen3):
    odd = random_model(replace(ODD, heads=3, kv_heads=3))
    with pytest.raises(ConfigError, match=r"3 query heads, 3 key heads cannot be split evenly: take one of 1, 3"):
        Engine(odd, EngineConfig(tensor_parallel_size=2))
    with pytest.raises(ConfigError, match=r"data_parallel_size=2 with tensor_parallel_size=2: expected 4 devices"):
        serving.check_devices(qwen3.config, EngineConfig(tensor_parallel_size=2), 2)
    with pytest.raises(ConfigError, match=r"3 query heads, 3 key heads cannot be split evenly"):
        serving.check_devices(odd.config, EngineConfig(tensor_parallel_size=2), 1)
    serving.check_devices(qwen3.config, EngineConfig(), 2)
    with pytest.raises(ConfigError, match="1 devices were passed"):
        Engine(odd, EngineConfig(tensor_parallel_size=2), devices=jax.devices()[:1])


def test_a_bench_times_steps_beside_shared_bytes_and_sums(engine):
    ceilings = Ceilings(1e12, 1e10, "", 1, [], [])
    (row,) = steps(engine, "cpu", ceilings)
    engine._runner.reset()
    assert (row.extra["devices"], row.extra["batch"], row.extra["context"]) == (2, 1, 64)
    assert row.timing.median_ms > 0
    one_sum = row.extra["all_reduce_us"] / 1e3
    assert one_sum > 0
    pool = engine._runner.state.pool
    moved = (4 * weight_count(engine.model) + 64 * pool.nbytes / pool.shape[2]) / 2
    assert row.floor.memory_ms == pytest.approx(moved / 1e10 * 1e3 + (2 * engine.model.layers + 1) * one_sum)


def test_parameters_made_on_devices_are_one_whole_however_it_is_shared():
    made = MadeParameters(ODD, "float32")
    a, b = (jax.tree.leaves(put(ODD, x, "float32", *jax.devices())) for x in (made, dict(made)))
    for x, y in zip(a, b, strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        # Compilers may round the last bit of a part in another way.
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    gate = made["layers.1.gate"]
    assert abs(float(gate.std()) / 0.03 - 1) < 0.05
    assert not np.array_equal(gate, made["layers.0.gate"])
    assert abs(float(made["layers.1.attn_norm"].mean()) - 1) < 0.1


@pytest.fixture
def written(monkeypatch) -> list[int]:
    """How many rows there were whenever a result was written."""
    found: list[int] = []

    def write(result: CaseResult, folder: Path) -> Path:
        found.append(len(result.rows))
        return write_result(result, folder)

    monkeypatch.setattr(bench_devices, "write_result", write)
    return found


@pytest.mark.thorough
def test_one_model_on_one_and_two_devices_is_timed_and_written_row_by_row(tmp_path, monkeypatch, written, capsys):
    monkeypatch.setattr(bench_parallel, "REPEATS", 2)
    monkeypatch.setattr(bench_devices, "SEQUENCES", 4)
    monkeypatch.setattr(bench_parallel, "SEQUENCES", 4)
    path = bench_parallel.run(LlmBench(random_model(replace(ODD, layers=1)), "odd", "cpu", "float32", "auto", tmp_path))
    result = read_result(path)
    assert written == [1, 2, 3, 4]
    assert [(row["extra"]["devices"], row["extra"]["batch"]) for row in result["rows"]] == [
        (1, 1),
        (1, 4),
        (2, 1),
        (2, 4),
    ]
    alone, shared = result["rows"][0], result["rows"][2]
    ratio = shared["extra"]["tokens_per_second"] / alone["extra"]["tokens_per_second"]
    assert shared["extra"]["speed_up"] == shared["extra"]["speed_up_of_the_same_kernels"] == pytest.approx(ratio)
    assert [*result["conditions"]["ready_seconds"]] == ["1 device, plain", "2 devices, plain"]
    assert result["gate"]["greedy tokens from the first on that differs, of 80, 2 devices, plain"] == 0
    assert "2 devices, plain, batch 4, context 64" in capsys.readouterr().err


@pytest.mark.thorough
def test_copies_behind_one_server_are_timed_and_know_what_was_said(tmp_path, monkeypatch, written):
    sizes = {"TURNS": 2, "OPENING": 33, "QUESTION": 5, "ANSWER": 7, "REPEATS": 1, "SEQUENCES": 4, "BUDGET": 128}
    for name, value in sizes.items():
        monkeypatch.setattr(bench_replicas, name, value)
    monkeypatch.setattr(bench_devices, "SEQUENCES", 4)
    path = bench_replicas.run(LlmBench(random_model(replace(ODD, layers=1)), "odd", "cpu", "float32", "auto", tmp_path))
    one, two = read_result(path)["rows"]
    assert written == [1, 2]
    assert one["extra"]["tokens_per_second"] == pytest.approx(4 * 2 * 7 / one["timing"]["median_ms"] * 1e3)
    assert two["extra"]["tokens_per_second"] == pytest.approx(8 * 2 * 7 / two["timing"]["median_ms"] * 1e3)
    # Of a conversation's 38 and 50 prompt tokens, two whole blocks were there when the second question came.
    assert one["extra"]["found_in_prefix_caches"] == pytest.approx(32 / 88)
    assert 0 < two["extra"]["found_in_prefix_caches"] <= 32 / 88


def test_parameters_that_cannot_be_read_in_part_are_cut():
    made = dict(RandomParameters(ODD, "float32"))
    a, b = (jax.tree.leaves(put(ODD, x, "float32", *jax.devices())) for x in (made, random_model(ODD).parameters))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)
    del made["layers.0.down"]
    with pytest.raises(ConfigError, match=r"layers\.0\.down is missing"):
        put(ODD, made, "float32", *jax.devices())
    made["layers.0.down"] = np.zeros((64, 95), np.float32)
    with pytest.raises(ConfigError, match=r"layers\.0\.down has the shape \(64, 95\)"):
        put(ODD, made, "float32", *jax.devices())
