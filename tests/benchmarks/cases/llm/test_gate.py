from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cases.llm import case as bench
from benchmarks.cases.llm import devices as bench_devices
from benchmarks.cases.llm import hostile as bench_hostile
from benchmarks.cases.llm import latency as bench_latency
from benchmarks.cases.llm import parallel as bench_parallel
from benchmarks.cases.llm import replicas as bench_replicas
from benchmarks.cases.llm import serve as bench_serve
from benchmarks.cases.llm import shared as bench_shared
from benchmarks.cases.llm import soak as bench_soak
from benchmarks.cases.llm import speculation as bench_speculation
from benchmarks.cases.llm import sweep as bench_sweep
from benchmarks.cases.llm.gate import Dense, gate
from benchmarks.cases.llm.options import WORKLOADS
from benchmarks.cases.llm.shared import LlmBench
from benchmarks.cases.llm.transformers_side import network
from benchmarks.cases.llm.work import ModelWork
from benchmarks.cli.app import app
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.kernels.xla import attention as plain_attention
from fullstride.llm.weights import load
from fullstride.measure.gate import GateError
from tests.llm import reference, tiny

pytestmark = pytest.mark.usefixtures("compiled_soon")
GATED = (
    bench,
    bench_hostile,
    bench_latency,
    bench_parallel,
    bench_replicas,
    bench_serve,
    bench_soak,
    bench_speculation,
    bench_sweep,
)
LENGTHS = (5, 40)


def _engine(folder, **settings):
    loaded = load(folder, dtype=settings.get("dtype", "float32"))
    config = EngineConfig(max_sequences=3, max_tokens_per_step=32, max_length=64, kv_blocks=16, **settings)
    return Engine(loaded, config), loaded.parameters


@pytest.fixture
def broken(monkeypatch):
    """Attention that ignores the scale of its values."""
    whole = plain_attention.attend
    monkeypatch.setattr(plain_attention, "attend", lambda *given: 2 * whole(*given))


@pytest.mark.parametrize("kind", ["tiny_qwen3", "tiny_llama", "tiny_qwen2"])
def test_the_dense_pass_is_numpys(kind, request):
    loaded = load(request.getfixturevalue(kind), dtype="float32")
    ids = np.random.default_rng(0).integers(3, 300, 30).tolist()
    (found,) = Dense(loaded.config, loaded.parameters, "float32", jax.devices()[0]).logprobs([ids], 4)
    scores = reference.logits(loaded.config, loaded.parameters, ids)[-5:-1]
    expected = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    np.testing.assert_allclose(found, expected, atol=1e-3)


SOME = ("granite", "olmo2", "gemma3_text", "gpt_oss")
REST = [pytest.param(name, marks=pytest.mark.thorough) for name in tiny.FAMILIES if name not in SOME]


@pytest.mark.parametrize("kind", [*SOME, *REST])
def test_the_dense_pass_of_other_families_is_transformers(tiny_model, kind):
    loaded = load(tiny_model(kind, **tiny.FAMILIES[kind]), dtype="float32")
    ids = np.random.default_rng().integers(3, 300, 70).tolist()
    (found,) = Dense(loaded.config, loaded.parameters, "float32", jax.devices()[0]).logprobs([ids], 4)
    with torch.no_grad():
        scores = network(loaded, "cpu", "eager")(torch.tensor([ids])).logits[0].double()
    expected = scores.log_softmax(-1).numpy()[-5:-1]
    np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.fixture(scope="module")
def right(one_layer):
    """An engine that is right, and its weights."""
    return _engine(one_layer)


def test_an_engine_that_is_right_passes(right: tuple[Engine, Mapping]):
    found = gate(*right, LENGTHS, 3, "one")
    assert list(found) == ["error of logprobs, one", "greedy tokens' shortfall, 3 at once, one"]
    assert max(found.values()) < 1e-3


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}])
def test_rounding_passes_within_its_limit(tiny_model, settings):
    # Weights as small as those of models: the other tiny ones' make softmaxes that rounding turns around.
    folder = tiny_model("llama", initializer_range=0.1, num_hidden_layers=1)
    assert 1e-3 < max(gate(*_engine(folder, **settings), LENGTHS, 3).values()) < 0.25


def test_a_kernel_that_is_wrong_fails_in_bfloat16(one_layer, broken):
    engine = _engine(one_layer, dtype="bfloat16")
    with pytest.raises(GateError, match=r"error of logprobs: .* nats from a dense pass .* not timed"):
        gate(*engine, LENGTHS, 3)


def test_a_decode_step_of_many_that_is_wrong_fails(one_layer, monkeypatch):
    """Check that a wrong step of many fails even if single ones and prompts are right."""
    whole = plain_attention.attend
    monkeypatch.setattr(
        plain_attention,
        "attend",
        lambda q, *given: whole(q, *given) * (-2 if q.shape[0] > 1 and q.shape[1] == 1 else 1),
    )
    engine = _engine(one_layer)
    with pytest.raises(GateError, match="greedy tokens' shortfall, 3 at once"):
        gate(*engine, LENGTHS, 3)


def test_what_is_not_a_number_fails(right: tuple[Engine, Mapping], monkeypatch):
    whole = Dense.logprobs
    monkeypatch.setattr(Dense, "logprobs", lambda *given: [np.nan * each for each in whole(*given)])
    with pytest.raises(GateError, match="nan nats"):
        gate(*right, LENGTHS, 3)


def _fails(engine: Engine, parameters: Mapping, lengths: Sequence[int], at_once: int, name: str = "") -> None:
    """Stand-in for a gate."""
    assert lengths
    assert at_once > 0
    raise GateError("a stand-in; not timed")


@pytest.mark.parametrize(
    ("workload", "kernels"),
    [
        ("small", "broken"),
        *((name, "any") for name in WORKLOADS),
        *(pytest.param(name, "broken", marks=pytest.mark.thorough) for name in WORKLOADS if name != "small"),
    ],
)
def test_every_workload_is_gated(one_layer, tmp_path, monkeypatch, request, workload, kernels):
    """With wrong kernels, or, on an engine that all share, by a gate that fails whatever they are."""
    if kernels == "broken":
        request.getfixturevalue("broken")
    else:
        idle = request.getfixturevalue("idle")
        for module in GATED:
            monkeypatch.setattr(module, "gate", _fails)
        for module in (bench_shared, bench_latency, bench_parallel, bench_replicas):
            monkeypatch.setattr(module, "Engine", lambda *_, **__: idle)
    monkeypatch.setattr(bench_latency, "_starts", lambda *_: [dict.fromkeys(bench_latency.PHASES, 1.0)])
    monkeypatch.setattr(bench, "large", lambda *_: ModelWork([[5] * 20, [6] * 9], [4, 8]))
    monkeypatch.setitem(bench_sweep.GRIDS, "cpu", ((1, 2), (20, 40)))
    monkeypatch.setitem(bench_serve.LENGTHS, "cpu", (20, 6))
    monkeypatch.setitem(bench_serve.CLIENTS, "cpu", (2,))
    monkeypatch.setattr(bench_devices, "COUNTS", (1,))
    monkeypatch.setattr(bench_replicas, "ANSWER", 9)  # a conversation fits the model
    asked = {"small": ["--no-baseline"], "large": ["--sequences", "2"]}.get(workload, [])
    arguments = ["llm", "--model", str(one_layer), "--workload", workload, "--out", str(tmp_path), *asked]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, GateError) or "not timed" in result.output
    assert not list(tmp_path.glob("*.json"))


def test_packed_weights_are_judged_by_their_own_numbers(tiny_model):
    """Numbers of int4 differ from the folder's by more than the limit; the gate is for kernels and not for formats."""
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    engine, parameters = _engine(tiny_model("llama", num_hidden_layers=1, **settings), quantize="int4")
    with pytest.raises(GateError, match="error of logprobs"):
        gate(engine, parameters, LENGTHS, 3)
    bench = LlmBench(SimpleNamespace(config=engine.model, parameters=parameters), "", "cpu", None, "auto", Path())
    assert max(gate(engine, bench.numbers(engine), LENGTHS, 3).values()) < 1e-3
