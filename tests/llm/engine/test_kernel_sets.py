"""Engines whose kernels are CUDA's, run by the emulator."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import tests.llm.kernels.emulation  # noqa: F401 # lowers kernels for a CPU
from fullstride.errors import ConfigError
from fullstride.llm.bench_work import RandomParameters
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import Engine, EngineConfig, engine
from fullstride.llm.engine.runner import Runner
from fullstride.llm.kernels import choose
from fullstride.llm.kernels.cuda.sets import paged, with_token
from fullstride.llm.sampling_params import SamplingParams
from tests.llm.engine.conftest import run

MODEL = ModelConfig("qwen3", 200, 256, 256, 1, 2, 1, 128, 256, tied=True, qk_norm=True)
HOPPER = SimpleNamespace(
    platform="gpu", compute_capability="9.0", core_count=132, memory_stats=lambda: {"bytes_limit": 100 << 30}
)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def answers(monkeypatch, kernels, requests):
    """Greedy tokens of an engine with these kernels, whose steps are few and small."""
    monkeypatch.setattr(engine, "choose", lambda *_: kernels)
    loaded: Any = SimpleNamespace(config=MODEL, parameters=RandomParameters(MODEL, "bfloat16"), tokenizer=None)
    config = EngineConfig(
        dtype="bfloat16", kv_blocks=40, max_sequences=2, max_tokens_per_step=16, max_length=64, block_size=8,
        steps_per_dispatch=2, compile_cache=False,
    )  # fmt: skip
    return [completion.tokens for completion in run(Engine(loaded, config), *requests)]


def test_tokens_are_the_plain_sets(monkeypatch):
    requests = [([5, 6, 7], greedy(5)), (list(range(40, 53)), greedy(4))]
    expected = answers(monkeypatch, choose("plain", MODEL, "bfloat16", 8, jax.devices()[0]), requests)
    assert answers(monkeypatch, paged(), requests) == expected
    assert answers(monkeypatch, with_token(MODEL, 4), requests) == expected


@pytest.mark.parametrize(
    ("changes", "dtype", "name"),
    [
        ({}, "bfloat16", "token"),
        ({"hidden_size": 384}, "bfloat16", "paged"),
        ({}, "float32", "plain"),
        ({"head_dim": 96}, "bfloat16", "plain"),
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
    assert paged().whole is None


def test_what_rows_ask_for_chooses_the_program(monkeypatch):
    """And they agree where both can run."""
    used, real = set(), Runner._run

    def run(runner, key, packed, quick):
        used.add((key[0], quick))
        return real(runner, key, packed, quick)

    monkeypatch.setattr(Runner, "_run", run)
    plain = choose("plain", MODEL, "bfloat16", 8, jax.devices()[0])._replace(quick=True)
    hot = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, seed=5)
    quick = answers(monkeypatch, plain, [([5, 6, 7], hot)])
    # Of the last steps not all are needed.
    assert used == {("mixed", True), ("decode", True), ("decode", False)}
    used.clear()
    slow = answers(monkeypatch, plain, [([5, 6, 7], replace(hot, logprobs=1))])
    assert used == {("mixed", False), ("decode", False)}
    assert quick == slow
