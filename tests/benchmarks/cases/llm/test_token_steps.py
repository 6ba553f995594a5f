import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import tests.llm.kernels.emulation  # noqa: F401  # kernels on a CPU
from benchmarks.cases.llm import attention, token_steps
from benchmarks.cases.llm.work import RandomParameters
from benchmarks.cli.app import app
from fullstride.llm.kernels.cuda.target import HOPPER
from tests.llm.kernels.test_token import ALONE


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The command with a tiny model, of which a program has two steps."""
    loaded = SimpleNamespace(config=ALONE, parameters=RandomParameters(ALONE, "bfloat16"))
    monkeypatch.setattr(token_steps, "model", lambda *_: loaded)
    monkeypatch.setattr(token_steps, "target_of", lambda _: HOPPER)
    monkeypatch.setattr(token_steps, "thread_blocks", lambda *_: 6)
    monkeypatch.setattr(token_steps, "PLAN", attention.GLANCE)
    monkeypatch.setattr(token_steps, "STEPS", 2)
    monkeypatch.setattr(token_steps, "RUNS", 2)

    def run(*arguments):
        result = CliRunner().invoke(app, ["llm-token", *arguments, "--out", str(tmp_path)])
        files = list(tmp_path.glob("llm-token--*.json"))
        return result, json.loads(files[0].read_text()) if files else None

    return run


def test_steps_are_checked_and_stand_beside_their_bound(measured):
    result, found = measured("--rows", "2", "--contexts", "19")
    assert result.exit_code == 0, result.output
    [row] = found["rows"]
    assert row["name"] == "2 rows, context 19"
    assert 0 < found["gate"][row["name"]] <= token_steps.TOLERANCE
    # All matrices once, and keys and values of both rows' contexts: two bytes a number.
    hidden, heads, inner = ALONE.hidden_size, ALONE.heads * ALONE.head_dim, ALONE.intermediate_size
    kv = ALONE.kv_heads * ALONE.head_dim
    layer = hidden * (heads + 2 * kv) + heads * hidden + 3 * hidden * inner
    assert row["extra"]["bytes"] == 2 * (ALONE.layers * (layer + 2 * 2 * 19 * kv) + ALONE.vocab_size * hidden)
    assert row["extra"]["tokens_per_second"] == pytest.approx(2 / row["timing"]["median_ms"] * 1e3)


def test_logits_that_are_not_the_same_each_time_are_not_timed(measured, monkeypatch):
    bench = SimpleNamespace(error=lambda: 0.7, different=lambda: 2)
    monkeypatch.setattr(token_steps, "Bench", lambda *_: bench)
    result, found = measured("--rows", "1", "--contexts", "9")
    assert result.exit_code == 1
    assert "2 of 2 runs differ" in result.output
    assert found is None  # nothing was timed


def test_other_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(token_steps, "target_of", lambda _: None)
    result = CliRunner().invoke(app, ["llm-token", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "expected a GPU of compute capability 9.0" in result.stderr
