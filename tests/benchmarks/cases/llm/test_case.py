import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.cases.llm import beside as bench_beside
from benchmarks.cases.llm import latency as bench_latency
from benchmarks.cases.llm import parallel as bench_parallel
from benchmarks.cases.llm import replicas as bench_replicas
from benchmarks.cases.llm import serve as bench_serve
from benchmarks.cases.llm import shared as bench_shared
from benchmarks.cases.llm import sweep as bench_sweep
from benchmarks.cases.llm import work as bench_work
from benchmarks.cases.llm.clients import ClientRequest, ask
from benchmarks.cases.llm.serve import stand_in
from benchmarks.cases.llm.sweep import prompt_operations
from benchmarks.cases.llm.work import SHAPES, ModelWork, RandomParameters, large, small
from benchmarks.cli.app import app
from fullstride.llm.config import ModelConfig, parameter_shapes
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import RooflineBound
from tests.llm.server.live import fake_server

pytestmark = pytest.mark.usefixtures("compiled_soon")


def test_the_large_workload_is_nano_vllms():
    work = large(151_936, 256)
    assert (sum(map(len, work.prompts)), work.tokens) == (142_827, 133_966)
    assert max(max(prompt) for prompt in large(300, 5).prompts) < 300


def test_the_floor_reads_weights_at_each_step_and_each_context_once_a_token():
    assert ModelWork([[1] * 3, [1]], [2, 4]).floor_bytes(weights=100, kv=10) == 4 * 100 + 10 * (
        (3 + 4) + (1 + 2 + 3 + 4)
    )
    assert [len(prompt) for prompt in small(50).prompts] == [12, 20, 28, 36]


def test_random_weights_are_the_same_each_time_and_of_the_shape():
    config = SHAPES["qwen3-0.6b"]
    made = RandomParameters(config, "bfloat16")
    assert sum(int(np.prod(shape)) for shape in parameter_shapes(config).values()) == 596_049_920
    np.testing.assert_array_equal(made["layers.3.k"], made["layers.3.k"])
    assert made["layers.3.k"].shape == (1024, 1024)
    assert made["layers.3.k"].dtype == "bfloat16"
    assert not np.array_equal(made["layers.3.k"], made["layers.4.k"])


def test_the_baselines_process_makes_bf16_weights_without_jax():
    code = """
import sys
from benchmarks.cases.llm.work import SHAPES, RandomParameters
made = RandomParameters(SHAPES["qwen3-0.6b"], "bfloat16")["layers.0.q_norm"]
assert made.dtype.name == "bfloat16" and abs(float(made.astype("f").mean()) - 1) < 0.1
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.thorough  # the same without its peer is below, and the peer in test_beside.py
def test_it_stands_beside_transformers_whose_attention_is_asked_for_by_name(one_layer, tmp_path):
    arguments = ["llm", "--model", str(one_layer), "--runs", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--baseline-attention", "eager"])
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("llm--*--baseline-attention-eager--*.json")
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == ["fullstride", "transformers, one by one", "transformers, batched"]
    # Which compares both with each other.
    assert found["gate"].pop("greedy tokens that differ from transformers, of 20") == 0
    assert list(found["gate"]) == ["error of logprobs", "greedy tokens' shortfall, 4 at once"]
    for row in found["rows"]:
        assert row["over_floor"] > 1
        assert row["extra"]["tokens_per_second"] > 0
    assert found["conditions"]["tokens"] == 400
    assert found["conditions"]["baseline_attention"] == "eager"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--baseline-attention", "math"), "--baseline-attention=math: expected one of sdpa, eager"),
        (("--baseline-attention", "eager", "--no-baseline"), "--baseline-attention eager with --no-baseline"),
        (("--baseline-attention", "eager", "--workload", "large"), "--baseline-attention with --workload large: only"),
    ],
)
def test_attention_that_nothing_would_run_is_refused(tmp_path, arguments, message):
    result = CliRunner().invoke(app, ["llm", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_without_its_baseline_the_engine_is_timed_and_says_so(one_layer, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_beside, "_run_baseline", lambda *_: SimpleNamespace(returncode=3, stdout=""))
    arguments = ["llm", "--model", str(one_layer), "--runs", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("llm--*.json")
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == ["fullstride"]
    assert found["conditions"]["left_out"] == "transformers: exit code 3"


@pytest.mark.parametrize("workload", ["small", "latency"])
def test_kernels_that_cannot_run_here_are_refused_before_other_processes_run(
    tiny_qwen3, tmp_path, monkeypatch, workload
):
    ran = []
    monkeypatch.setattr(bench_beside, "_run_baseline", lambda *_: ran.append("transformers"))
    monkeypatch.setattr(bench_latency, "_starts", lambda *_: ran.append("starts"))
    arguments = ["llm", "--model", str(tiny_qwen3), "--workload", workload, "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--kernels", "token"])
    assert (result.exit_code, ran) == (2, [])
    assert result.stderr.startswith("error: kernels=token: made for a GPU of compute capability 9.0 (H100, H200), not")


def test_replicas_refuse_a_model_of_too_short_sequences_before_anything_runs(tmp_path, monkeypatch):
    short = ModelConfig("qwen3", 700, 32, 64, 2, 4, 2, 8, 523, tied=True, qk_norm=True)
    monkeypatch.setitem(SHAPES, "short", short)
    ran = []
    monkeypatch.setattr(bench_replicas, "Engine", lambda *_, **__: ran.append("engine"))
    arguments = ["llm", "--model", "short", "--workload", "replicas", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, ran) == (2, [])
    assert result.stderr == "error: short: the model supports 523 tokens per sequence, a conversation needs 524\n"


@pytest.mark.thorough
def test_the_sweep_times_a_step_by_batch_and_context(one_layer, tmp_path, monkeypatch):
    monkeypatch.setitem(bench_sweep.GRIDS, "cpu", ((1, 3, 9), (20, 300)))
    monkeypatch.setattr(bench_sweep, "REPEATS", 2)
    arguments = ["llm", "--model", str(one_layer), "--workload", "sweep", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("llm--*sweep*.json")
    found = json.loads(file.read_text())
    assert [(row["extra"]["batch"], row["extra"]["context"]) for row in found["rows"]] == [(1, 20), (3, 20), (9, 20)]
    assert found["conditions"]["left_out"] == ["batch 1, context 300", "batch 3, context 300", "batch 9, context 300"]
    assert found["conditions"]["kernels"] == "plain"
    # Keys and values of more rows take more reading.
    assert [row["floor"]["memory_ms"] for row in found["rows"]] == sorted(
        row["floor"]["memory_ms"] for row in found["rows"]
    )


@pytest.fixture
def untimed(idle, monkeypatch):
    """Neither build the engine of a sweep, nor gate or time it, which other tests do."""
    monkeypatch.setattr(bench_shared, "Engine", lambda *_, **__: idle)
    monkeypatch.setattr(bench_sweep, "gate", lambda *_: {})
    monkeypatch.setattr(bench_sweep, "step_samples", lambda *_: iter([3.0, 1.0, 2.0]))


def test_a_run_with_flags_of_xla_has_a_file_of_its_own(one_layer, tmp_path, monkeypatch, untimed):
    monkeypatch.setitem(bench_sweep.GRIDS, "cpu", ((1,), (20,)))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer= --xla_dump_to=/nowhere")
    arguments = ["llm", "--model", str(one_layer), "--out", str(tmp_path), "--workload", "sweep"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert len(list(tmp_path.glob("llm--*-gpu-enable-command-buffer-*.json"))) == 1
    assert not list(tmp_path.glob("*nowhere*"))


def test_a_sweep_that_is_cut_short_has_written_its_rows(one_layer, tmp_path, monkeypatch, untimed):
    monkeypatch.setitem(bench_sweep.GRIDS, "cpu", ((1, 3), (20,)))
    samples = bench_sweep.step_samples

    def cut(runner, batch, context):
        if batch == 3:
            raise OSError("the machine goes")
        yield from samples(runner, batch, context)

    monkeypatch.setattr(bench_sweep, "step_samples", cut)
    arguments = ["llm", "--model", str(one_layer), "--workload", "sweep", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).exit_code == 1
    (file,) = tmp_path.glob("llm--*sweep*.json")
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == ["batch 1, context 20"]
    assert found["conditions"]["left_out"] == ["batch 3, context 20"]


@pytest.mark.thorough
def test_the_sweep_with_a_pool_of_fp8_reads_a_quarter_of_its_keys(one_layer, tmp_path, monkeypatch):
    monkeypatch.setitem(bench_sweep.GRIDS, "cpu", ((2,), (20,)))
    monkeypatch.setattr(bench_sweep, "REPEATS", 1)
    moved = []
    monkeypatch.setattr(
        bench_sweep, "roofline_bound", lambda operations, read, ceilings: moved.append(read) or RooflineBound(1.0, 1.0)
    )
    for kept in ("auto", "fp8"):
        arguments = ["llm", "--model", str(one_layer), "--workload", "sweep", "--out", str(tmp_path)]
        result = CliRunner().invoke(app, [*arguments, "--kv-cache-dtype", kept])
        assert result.exit_code == 0, result.output
    full, codes = moved
    # Keys and values of two heads of 16, of two rows with 20 tokens each: fp32, then a byte each.
    assert full - codes == 3 * (2 * 2 * 16) * 2 * 20
    assert len(list(tmp_path.glob("llm--*--fp8--*.json"))) == 1
    assert len(list(tmp_path.glob("llm--*.json"))) == 2
    refused = CliRunner().invoke(app, [*arguments[:-4], "--workload", "parallel", "--kv-cache-dtype", "fp8"])
    assert refused.exit_code == 2
    assert "expected one of" in refused.stderr


@pytest.mark.thorough
def test_latency_is_the_start_and_a_first_token(one_layer, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_latency, "STARTS", 1)
    monkeypatch.setattr(bench_latency, "REPEATS", 3)
    arguments = ["llm", "--model", str(one_layer), "--workload", "latency", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("llm--*latency*.json")
    start, *phases, first = json.loads(file.read_text())["rows"]
    assert start["name"].startswith("start")
    assert first["name"] == "first token, prompt of 255"
    # A process that imports JAX and builds an engine takes longer than a prompt of a tiny model.
    assert start["timing"]["median_ms"] > first["timing"]["median_ms"] > 0
    parts = [row["timing"]["median_ms"] for row in phases]
    assert [row["name"].split()[-1] for row in phases] == ["imports", "device", "model", "engine"]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(start["timing"]["median_ms"])


def test_random_weights_are_stored_whole(tmp_path):
    drawn = bench_work.model("qwen3-0.6b", "bfloat16")
    few = {name: drawn.parameters[name] for name in ("norm", "layers.0.q_norm")}
    bench_latency.store(few, tmp_path)
    read = bench_latency.stored(tmp_path, few["norm"].dtype)
    assert set(read) == set(few)
    for name, value in few.items():
        np.testing.assert_array_equal(read[name].astype(np.float32), value.astype(np.float32))


def test_tokens_agree_up_to_the_first_that_differs():
    assert bench_parallel.agreeing([[1, 2, 3], [4, 5, 6]], [[1, 9, 3], [4, 5, 6]]) == 1 + 3
    assert bench_parallel.largest_difference([{1: -1.0, 2: -2.0}], [{1: -1.25, 3: -9.0}]) == 0.25


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--workload", "sweep", "--runs", "3"], "--runs with --workload sweep: only small and large have this option"),
        (["--workload", "latency", "--no-baseline"], "--baseline with --workload latency: only small has this option"),
        (["--sequences", "7"], "--sequences with --workload small: only large has this option"),
        (["--adapters", "2"], "--adapters with --workload small: only serve and soak have this option"),
    ],
)
def test_a_setting_that_a_workload_does_not_have_is_refused(given, message, tmp_path):
    result = CliRunner().invoke(app, ["llm", *given, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_serving_times_what_clients_get_beside_the_engine_alone(one_layer, tmp_path, monkeypatch):
    # On a busy machine several tokens come in one part, of which an answer must have two.
    monkeypatch.setitem(bench_serve.LENGTHS, "cpu", (20, 24))
    monkeypatch.setitem(bench_serve.CLIENTS, "cpu", (1, 3))
    monkeypatch.setattr(bench_serve, "QUESTIONS", 2)
    arguments = ["llm", "--model", str(one_layer), "--workload", "serve", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("llm-serve--*--plain--*.json")
    found = json.loads(file.read_text())
    assert (found["conditions"]["prompt"], found["conditions"]["answer"]) == (20, 24)
    for row, count in zip(found["rows"], (1, 3), strict=True):
        extra = row["extra"]
        assert (extra["batch"], extra["requests"], len(row["timing"]["samples_ms"])) == (count, 2 * count, 2 * count)
        assert extra["share_of_the_engine"] == pytest.approx(
            extra["tokens_per_second"] / extra["engine_tokens_per_second"]
        )
        first = extra["first_token_ms"]
        assert 0 < first["median"] <= first["p90"] <= first["p99"]
        assert row["timing"]["median_ms"] > 0


@pytest.mark.thorough
def test_a_model_without_a_tokenizer_is_served_with_a_stand_in_and_an_adapter(tmp_path, monkeypatch):
    tiny = ModelConfig("qwen3", 700, 32, 64, 1, 4, 2, 8, 256, tied=True, qk_norm=True)
    monkeypatch.setitem(SHAPES, "tiny-shape", tiny)
    # On a busy machine several tokens come in one part, of which an answer must have two.
    monkeypatch.setitem(bench_serve.LENGTHS, "cpu", (20, 24))
    monkeypatch.setitem(bench_serve.CLIENTS, "cpu", (2,))
    arguments = ["llm", "--model", "tiny-shape", "--workload", "serve", "--adapters", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("llm-serve--*.json")
    found = json.loads(file.read_text())
    assert found["conditions"]["at"] == "adapters-1"
    assert found["conditions"]["tokenizer"] == "a stand-in"
    (row,) = found["rows"]
    # Parts come one after the other: the first is not the whole answer.
    assert min(row["timing"]["samples_ms"]) > 0
    weights = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32 + 3 * 32 * 64 + 700 * 32
    head = 700 * 32
    products = 2 * ((weights - head) * 20 + head)
    assert prompt_operations(tiny, 20) == pytest.approx(products, rel=0.02)  # and a few norms
    monkeypatch.setitem(bench_serve.LENGTHS, "cpu", (20, 256))
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "256 tokens per sequence, expected more than the 256 of an answer" in refused.stderr


def test_clients_say_what_a_server_refused(tiny_qwen3):
    with fake_server() as live:
        heard = ask(ClientRequest(live.url, ("fake",), [[[65, 66, 67]] * 2] * 3, 5, 0.0))
        assert heard.tokens == 2 * 3 * 5
        assert len(heard.firsts) == len(heard.paces) == 6
        assert all(0 < first < 1e3 * heard.seconds for first in heard.firsts)
        with pytest.raises(GateError, match="failed: RuntimeError: 404: .*other"):
            ask(ClientRequest(live.url, ("fake", "other"), [[[65]]] * 2, 5, 0.0))


def test_the_stand_in_for_a_tokenizer_has_a_text_for_every_token():
    tokenizer = stand_in(1000)
    assert tokenizer.vocab_size == 1000
    assert len({tokenizer.token_bytes(i) for i in range(1000)}) == 1000
    assert tokenizer.decode([0, 1, 27, 999]) == "aaaabaaabbaalmba"
