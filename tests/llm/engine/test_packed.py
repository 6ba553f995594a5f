"""Engines whose weights stay packed, beside the same ones with the same numbers unpacked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.cases.llm.work import SHAPES, RandomParameters
from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine import build as building
from fullstride.llm.engine.config import QUANTIZE
from fullstride.llm.engine.programs import Programs
from fullstride.llm.engine.runner import Runner, compiles
from fullstride.llm.engine.shapes import choose_shapes
from fullstride.llm.kernels import choose
from fullstride.llm.kernels.xla.kernels import plain
from fullstride.llm.models.packing import STORED, Packing, weight_bytes
from fullstride.llm.models.parameters import put
from fullstride.llm.packed import matrix
from fullstride.llm.packed.quantize import MADE
from fullstride.llm.sampling_params import Structured
from fullstride.llm.weights import load
from tests.llm.engine.conftest import TIGHT, finish, forget, run
from tests.llm.engine.test_engine import greedy, prompt
from tests.llm.engine.test_fp8 import pointers
from tests.llm.engine.test_kernel_sets import HOPPER, MODEL
from tests.llm.gguf_files import write_gguf
from tests.llm.lora import ATTENTION, MLP, save_adapter
from tests.llm.models.test_decoder import all_logits
from tests.llm.tiny import QWEN3, make_model

SIZES: dict[str, Any] = {**QWEN3, "hidden_size": 64, "intermediate_size": 96}
# A row's own adapter, a grammar, and keys and values in e4m3.
ALL = replace(TIGHT, kv_cache_dtype="fp8", max_loras=1, max_sequences=3)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return make_model("qwen3", 0, **SIZES)


@pytest.fixture(scope="module")
def file(theirs, tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("packed") / "model.gguf", theirs, "Q4_1")


@pytest.fixture(scope="module")
def engines(compiled_soon, theirs, file, tmp_path_factory) -> tuple[Engine, Engine]:
    """With packed weights and with the same numbers in fp32; both with an adapter and a KV cache in fp8."""
    rng, folder = np.random.default_rng(), tmp_path_factory.mktemp("adapters") / "one"
    save_adapter(folder, theirs, rng, rank=4, modules=ATTENTION + MLP)
    packed, full = (
        Engine(load(file, dtype="float32"), replace(ALL, quantize=name), adapters={"one": folder})
        for name in ("stored", "none")
    )
    return packed, full


@pytest.fixture
def rng(seed) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_same_tokens_with_adapters_grammars_and_fp8_together(engines, rng):
    ids, params = prompt(rng, 41), Structured("regex", "[a-z]{5} (yes|no)")
    found = []
    for engine in engines:
        engine.add("plain", ids, greedy(20))
        engine.add("adapted", ids, greedy(20), adapter="one")
        engine.add("shape", ids, greedy(20, structured_outputs=params))
        done = finish(engine)
        found.append([done[name, 0].tokens for name in ("plain", "adapted", "shape")])
        forget(engine)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_the_same_tokens_however_a_request_is_run_and_nothing_is_compiled(engines, rng):
    packed, _ = engines
    prompts = [prompt(rng, n) for n in (3, 50, 29)]
    alone = [run(packed, (ids, greedy(25)))[0].tokens for ids in prompts]
    before, places = compiles(), pointers(packed)
    assert [each.tokens for each in run(packed, *((ids, greedy(25)) for ids in prompts))] == alone
    assert (compiles(), pointers(packed)) == (before, places)


@pytest.mark.thorough
def test_the_same_tokens_with_drafts(engines, file, rng):
    packed, _ = engines
    drafting = Engine(
        load(file, dtype="float32"), replace(ALL, quantize="stored", speculative_config={"method": "ngram"})
    )
    ids = prompt(rng, 9) * 5
    assert [each.tokens for each in run(drafting, (ids, greedy(40)))] == [
        each.tokens for each in run(packed, (ids, greedy(40)))
    ]


@pytest.mark.parametrize("name", ["stored", *MADE])
def test_logits_are_those_of_the_packed_numbers(file, rng, name, monkeypatch):
    """The weights on the device are those of the format, and so are logits, in fp32."""
    loaded: Any = load(file, dtype="float32")
    put_whole, weights = put, {}

    def kept(*arguments: Any, **more: Any) -> Any:
        weights["packed"] = put_whole(*arguments, packing=Packing(name), **more)
        return weights["packed"]

    def unpacked(leaf: Any) -> Any:
        return matrix.numbers(leaf, np.float32) if isinstance(leaf, matrix.PackedMatrix) else leaf

    ids = prompt(rng, 30)
    monkeypatch.setattr("tests.llm.models.test_decoder.put", kept)
    found = all_logits(loaded, ids)
    numbers = jax.tree.map(unpacked, weights["packed"], is_leaf=lambda x: isinstance(x, matrix.PackedMatrix))
    monkeypatch.setattr("tests.llm.models.test_decoder.put", lambda *_, **__: numbers)
    for own, expected in zip(found, all_logits(loaded, ids), strict=True):
        assert np.abs(own - expected).max() < 1e-5 * np.abs(expected).max()
    if name == STORED:
        np.testing.assert_allclose(numbers.layers[1].o, loaded.parameters["layers.1.o"], rtol=0, atol=1e-7)


def test_unpacked_numbers_of_all_layers_never_stand_in_memory():
    """On the optimised program of a burst of decode steps: one layer's at most, and of a large matrix a part."""
    config = ModelConfig("llama", 512, 256, 768, 8, 4, 2, 64, 512, tied=True)
    kernels, device = plain(dynamic=True), jax.devices()[0]
    settings = EngineConfig(max_sequences=1, max_tokens_per_step=32, kv_blocks=8, max_length=64, steps_per_dispatch=4)
    sizes = choose_shapes(settings, config, kernels, device)
    runner = Runner.__new__(Runner)
    runner.programs, runner.sizes = Programs(config, kernels, sizes), sizes
    runner.device = device
    runner.mesh = None
    weights = put(config, RandomParameters(config, "float32"), "float32", device, packing=Packing("int4"))
    runner._leaves, runner._tree = jax.tree.flatten(weights)
    runner.state = runner._blank()
    memory = runner.lower(("decode", 1, 0, sizes.widths[0])).compile().memory_analysis()
    layer = weight_bytes(config, "float32", lambda _: None) / config.layers
    assert memory.temp_size_in_bytes < layer


def test_memory_of_a_large_shape():
    """Bytes of Qwen3-8B's shape, by the sizes of the arrays that hold it."""
    config = SHAPES["qwen3-8b"]

    def gguf(name: str) -> str:
        return "Q6_K" if name == "head" else "Q4_K"

    def int4(name: str) -> str | None:
        return None if name in ("embed", "head") else "int4_128"

    assert weight_bytes(config, "bfloat16", gguf) < 5.1e9
    assert weight_bytes(config, "bfloat16", int4) < 6.2e9
    small = replace(config, layers=1, vocab_size=320, hidden_size=256, intermediate_size=512)
    weights = put(small, RandomParameters(small, "float32"), "bfloat16", jax.devices()[0], packing=Packing("fp8"))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) == weight_bytes(small, "bfloat16", lambda _: "fp8")


def test_auto_keeps_weights_packed_if_they_would_not_fit(file, monkeypatch):
    loaded: Any = load(file)
    assert building._quantize(loaded, EngineConfig(), None) == "none"
    monkeypatch.setattr(building, "free_memory", lambda _: weight_bytes(loaded.config, "float32", lambda _: None))
    assert building._quantize(loaded, EngineConfig(), None) == "stored"
    assert building._quantize(loaded, EngineConfig(quantize="none"), None) == "none"


def test_what_cannot_be_packed_is_refused(qwen3):
    assert {"auto", "none", STORED, *MADE} == set(QUANTIZE)
    with pytest.raises(ConfigError, match="quantize=int3: expected one of .*int4"):
        EngineConfig(quantize="int3")
    with pytest.raises(ConfigError, match="quantize=stored: the model's files have no packed weights; take fp8"):
        Engine(qwen3, EngineConfig(quantize="stored"))
    with pytest.raises(ConfigError, match=r"quantize=int4: layers\.0\.q has 48 inputs on a device, expected"):
        Engine(qwen3, EngineConfig(quantize="int4", max_sequences=1))
    with pytest.raises(ConfigError, match="quantize=fp8 with dtype=float16: expected bfloat16 or float32"):
        building.select_kernels(qwen3.config, EngineConfig(quantize="fp8", dtype="float16"))
    experts = replace(qwen3.config, experts=4, experts_per_token=2)
    with pytest.raises(ConfigError, match="quantize=fp8: matrices of a mixture of experts cannot be packed"):
        building.select_kernels(experts, EngineConfig(quantize="fp8"))
    for name in ("token", "chained"):
        with pytest.raises(ConfigError, match=f"kernels={name}: its kernels read weights in bfloat16 alone"):
            choose(name, MODEL, "bfloat16", 16, HOPPER, packed=True)
    found = choose("auto", MODEL, "bfloat16", 16, HOPPER, packed=True)
    assert (found.name, found.tiled) == ("paged", True)
    assert not choose("auto", MODEL, "float32", 16, HOPPER, packed=True).tiled
