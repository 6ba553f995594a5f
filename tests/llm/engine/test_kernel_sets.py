"""Engines whose kernels are CUDA's, run by the emulator."""

import random
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import tests.llm.kernels.emulation  # noqa: F401 # lowers kernels for a CPU
from benchmarks.cases.llm.work import RandomParameters
from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine import build as parts
from fullstride.llm.engine.acceptance import StepTimes
from fullstride.llm.engine.runner import Runner
from fullstride.llm.kernels import COMMON, COMPUTED, choose
from fullstride.llm.kernels.cuda.sets import made
from fullstride.llm.kernels.cuda.target import target_of
from fullstride.llm.kernels.interface import FP8_POOL
from fullstride.llm.kernels.xla.kernels import project as xla_project
from fullstride.llm.sampling_params import SamplingParams
from tests.llm.engine.conftest import run

pytestmark = pytest.mark.usefixtures("compiled_soon")

MODEL = ModelConfig("qwen3", 200, 256, 256, 1, 2, 1, 128, 256, tied=True, qk_norm=True)
HOPPER = SimpleNamespace(
    platform="gpu", compute_capability="9.0", core_count=132, memory_stats=lambda: {"bytes_limit": 100 << 30}
)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def kernels_of(name, model=MODEL, project=False, **target: Any):
    """Return a set, with XLA's products of prompts unless its own are to be emulated, too."""
    kernels: Any = made(name, model, SimpleNamespace(core_count=4), **target)
    return kernels if project else kernels._replace(project=xla_project)


def answers(monkeypatch, kernels, requests, model=MODEL, **settings: Any):
    """Greedy tokens of an engine with these kernels, whose steps are few and small."""
    monkeypatch.setattr(parts, "choose", lambda *_, **__: kernels)
    loaded: Any = SimpleNamespace(config=model, parameters=RandomParameters(model, "bfloat16"), tokenizer=None)
    config = EngineConfig(
        dtype="bfloat16", kv_blocks=40, max_sequences=2, max_tokens_per_step=16, max_length=64, block_size=8,
        steps_per_dispatch=2, compile_cache=False, **settings,
    )  # fmt: skip
    return [completion.tokens for completion in run(Engine(loaded, config), *requests)]


@pytest.mark.parametrize(
    "names", [("token",), pytest.param(("paged", "chained"), marks=pytest.mark.thorough)], ids="-".join
)
def test_tokens_are_the_plain_sets(monkeypatch, names):
    """In the tests below, `chained` has a KV cache of fp8, and `paged` a model of another family."""
    requests = [([5, 6, 7], greedy(5)), (list(range(40, 53)), greedy(4))]
    expected = answers(monkeypatch, choose("plain", MODEL, "bfloat16", 8, jax.devices()[0]), requests)
    for name in names:
        assert answers(monkeypatch, kernels_of(name, project=names != ("token",)), requests) == expected


@pytest.mark.thorough
def test_tokens_are_the_plain_sets_with_a_pool_of_fp8(monkeypatch):
    requests = [([5, 6, 7], greedy(4)), (list(range(40, 53)), greedy(3))]
    kept: dict[str, Any] = {"kv_cache_dtype": "fp8"}
    expected = answers(monkeypatch, choose("plain", MODEL, "bfloat16", 8, jax.devices()[0]), requests, **kept)
    assert answers(monkeypatch, kernels_of("chained"), requests, **kept) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kept"), [("token", {}), ("chained", {"kv_cache_dtype": "fp8"})])
def test_drafts_are_verified_whatever_the_set(monkeypatch, name, kept):
    ran, original = [], Runner.run
    monkeypatch.setattr(Runner, "run", lambda self, key, *given: ran.append(key[0]) or original(self, key, *given))
    monkeypatch.setattr(StepTimes, "ratio", lambda *_: 0.0)
    requests = [([5, 6, 7] * 4, greedy(9)), (list(range(40, 53)), greedy(7))]
    expected = answers(monkeypatch, choose("plain", MODEL, "bfloat16", 8, jax.devices()[0]), requests, **kept)
    assert "verify" not in ran
    drafts: Any = {"num_speculative_tokens": 3, "prompt_lookup_min": 1}
    made_set = made(name, MODEL, SimpleNamespace(core_count=4))
    assert answers(monkeypatch, made_set, requests, speculative_config=drafts, **kept) == expected
    assert "verify" in ran


def test_layers_of_other_families_are_the_plain_sets_with_paged_attention(monkeypatch):
    """Forms are those of a GPU before Hopper; the window has fewer tokens than a prompt."""
    model = replace(MODEL, residual_scale=0.3, attention_scale=0.2, logit_cap=5.0, post_norm=True, exact_norm=True)
    model = replace(model, activation="gelu_tanh", unrotated=(0,), windows=(9,), attention_cap=3.0)
    requests = [([5, 6, 7], greedy(4)), (list(range(40, 53)), greedy(3))]
    expected = answers(monkeypatch, choose("plain", model, "bfloat16", 8, jax.devices()[0]), requests, model)
    assert answers(monkeypatch, kernels_of("paged", model, target=target_of("8.6")), requests, model) == expected


@pytest.mark.thorough
def test_layers_with_and_without_a_window_have_block_tables_of_their_own(monkeypatch):
    """Blocks before a window are given to others while a sequence goes on; heads have sinks."""
    model = replace(MODEL, layers=3, windows=(9, None, 9), sinks=True)
    requests = [(list(range(5, 45)), greedy(6)), (list(range(40, 53)), greedy(5)), (list(range(60, 95)), greedy(3))]
    expected = answers(monkeypatch, choose("plain", model, "bfloat16", 8, jax.devices()[0]), requests, model)
    for capability in ("8.6", "9.0"):
        kernels = kernels_of("paged", model, target=target_of(capability))
        assert answers(monkeypatch, kernels, requests, model) == expected


def test_a_set_that_lacks_what_a_model_needs_is_refused_and_not_chosen():
    windowed, scaled = replace(MODEL, windows=(64,), attention_cap=30.0), replace(MODEL, residual_scale=0.5)
    with pytest.raises(
        ConfigError, match="kernels=chained: its kernels do not compute windows, attention_cap, which the"
    ):
        choose("chained", windowed, "bfloat16", 16, HOPPER)
    with pytest.raises(ConfigError, match="kernels=token: its kernels do not compute residual_scale, which the qwen3"):
        choose("token", scaled, "bfloat16", 16, HOPPER)
    names = [choose("auto", model, "bfloat16", 16, HOPPER).name for model in (MODEL, scaled, windowed)]
    assert names == ["token", "paged", "paged"]


def test_every_field_of_a_model_is_known_to_the_plain_set_alone_or_to_all():
    assert {each.name for each in fields(ModelConfig)} == COMMON | COMPUTED["plain"]
    assert not COMMON & COMPUTED["plain"]


@pytest.mark.parametrize(
    ("changes", "dtype", "name"),
    [
        ({}, "bfloat16", "token"),
        ({"hidden_size": 384}, "bfloat16", "chained"),
        ({"hidden_size": 200}, "bfloat16", "paged"),
        ({}, "float32", "plain"),
        ({"head_dim": 96}, "bfloat16", "chained"),
        ({"head_dim": 80}, "bfloat16", "plain"),
        # 11 GB of weights: it would be no faster.
        ({"hidden_size": 4096, "intermediate_size": 12288, "layers": 36}, "bfloat16", "paged"),
        # 30 GB of weights fit twice, but leave too little for keys and values.
        ({"hidden_size": 8192, "intermediate_size": 24576, "layers": 25}, "bfloat16", "paged"),
    ],
)
def test_auto_takes_the_fastest_that_can_run(changes, dtype, name):
    assert choose("auto", replace(MODEL, **changes), dtype, 16, HOPPER).name == name


def test_a_named_set_runs_or_says_why_not():
    with pytest.raises(ConfigError, match=r"kernels=token: made for a GPU of compute capability 9\.0"):
        choose("token", MODEL, "bfloat16", 16, jax.devices()[0])
    with pytest.raises(ConfigError, match="dtype float32"):
        choose("paged", MODEL, "float32", 16, HOPPER)
    assert choose("paged", MODEL, "bfloat16", 16, HOPPER).fused_step is None


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "10.0", "12.0"])
def test_other_gpus_have_paged_attention(capability):
    device = SimpleNamespace(platform="gpu", compute_capability=capability, core_count=100)
    assert choose("auto", MODEL, "bfloat16", 16, device).name == "paged"
    assert choose("auto", MODEL, "float32", 16, device).name == "plain"
    for name in ("token", "chained"):
        with pytest.raises(ConfigError, match=rf"capability 9\.0 \(H100, H200\), not for {capability}"):
            choose(name, MODEL, "bfloat16", 16, device)


@pytest.mark.parametrize("capability", ["7.5", "gfx942"])
def test_gpus_that_no_kernel_is_made_for_have_the_plain_set(capability):
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    assert choose("auto", MODEL, "bfloat16", 16, device).name == "plain"
    with pytest.raises(ConfigError, match=f"kernels=paged: made for an NVIDIA GPU .* not for {capability}"):
        choose("paged", MODEL, "bfloat16", 16, device)


def test_a_pool_of_fp8_is_refused_by_name():
    with pytest.raises(
        ConfigError, match="kernels=token: its kernels cannot read .*kv_cache_dtype is fp8; take kernels=auto"
    ):
        choose("token", MODEL, "bfloat16", 16, HOPPER, 1, FP8_POOL)
    assert choose("auto", MODEL, "bfloat16", 16, HOPPER, 1, FP8_POOL).name == "chained"
    assert choose("auto", MODEL, "bfloat16", 16, HOPPER, 2, FP8_POOL).name == "paged"
    assert choose("auto", MODEL, "float32", 16, HOPPER, 1, FP8_POOL).name == "plain"


@pytest.mark.thorough
def test_quick_programs_choose_the_same_tokens(monkeypatch, qwen3):
    """Whatever ends where: at its limit, by a stop token, with others waiting for a row; what rows ask for decides."""
    draw = random.Random(3)
    requests = [
        (
            [draw.randrange(3, 200) for _ in range(draw.randint(1, 40))],
            SamplingParams(
                temperature=float(i % 2), seed=i, max_tokens=draw.randint(1, 30), ignore_eos=i % 3 > 0,
                stop_token_ids=[draw.randrange(3, 200) for _ in range(4)],
            ),
        )
        for i in range(10)
    ]  # fmt: skip
    plain = choose("plain", qwen3.config, "float32", 4, jax.devices()[0])
    config = EngineConfig(
        max_sequences=3, max_tokens_per_step=32, block_size=4, kv_blocks=60, max_length=80, compile_cache=False
    )
    penalised = SamplingParams(
        temperature=0.0, max_tokens=20, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.7
    )
    found, used, real = [], set(), Runner.run

    def noted(runner, key, packed, quick):
        used.add((key[0], quick))
        return real(runner, key, packed, quick)

    for quick in (False, True):
        monkeypatch.setattr(parts, "choose", lambda *_, quick=quick, **__: plain._replace(static_burst=quick))
        made = Engine(qwen3, config)
        # Rows of quick steps are not counted: whoever has penalties in them next must not find that.
        done = [*run(made, *requests), *run(made, *[(ids, penalised) for ids, _ in requests[:3]])]
        found.append([(completion.tokens, completion.finish, completion.stop) for completion in done])
    assert found[0] == found[1]
    assert {finish for _, finish, _ in found[0]} == {"length", "stop"}
    monkeypatch.setattr(Runner, "run", noted)
    long = SamplingParams(temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
    (first,) = run(made, ([5, 6, 7], long))
    # Of the last steps not all are needed.
    assert used == {("mixed", True), ("decode", True), ("decode", False)}
    used.clear()
    (second,) = run(made, ([5, 6, 7], replace(long, logprobs=1)))
    assert used == {("mixed", False), ("decode", False)}
    assert first.tokens == second.tokens
