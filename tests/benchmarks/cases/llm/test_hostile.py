"""Tests of the waiting times under attack: every row, every answer, and errors; times are not tested."""

import contextlib
import json
from functools import partial

import pytest
from typer.testing import CliRunner

from benchmarks.cases.llm import hostile as bench_hostile
from benchmarks.cases.llm import shared as bench_shared
from benchmarks.cases.llm.hostile import IDLE, spread
from benchmarks.cases.llm.hostile_clients import ATTACKS, CUT_OFF, attack, waited
from benchmarks.cases.llm.work import SHAPES
from benchmarks.cli.app import app
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import EngineConfig
from fullstride.llm.text import grammar_trial
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import Ceilings
from tests.llm.server.live import fake_server

pytestmark = pytest.mark.usefixtures("compiled_soon")
WAITING = {"model": "fake", "vocab": 120, "prompt": 5, "seconds": 0.3}
STATUSES = {
    "a long text to tokenize": "200",
    "a long chat": "400",
    "a costly schema": "400",
    "a costly check": "200",
    "stop texts": "400",
    "logit biases": "400",
    "16 completions": "200",
    "a header without end": "431",
    "brackets": "400",
    "numbers": "400",
}


def _attack(url, name, size=300_000):
    return {"url": url, "attack": name, "size": size, "clients": 2}


@pytest.mark.thorough
def test_others_are_timed_beside_an_idle_server_and_by_attack(tiny_qwen3, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_hostile, "SECONDS", 0.2)
    monkeypatch.setattr(bench_hostile, "SIZE", 250_000)
    chosen = ("a long chat", "a costly schema", "a costly check", "a header without end")
    monkeypatch.setattr(bench_hostile, "ATTACKS", {name: ATTACKS[name] for name in chosen})
    ceilings = Ceilings(1e12, 1e11, "a product", 1, [1.0], [1.0])
    monkeypatch.setattr(bench_hostile, "jax_ceilings", lambda *_: ceilings)
    monkeypatch.setattr(bench_shared, "EngineConfig", partial(EngineConfig, max_length=64, max_sequences=2))
    monkeypatch.setattr(grammar_trial, "SECONDS", 0.5)
    arguments = ["llm", "--model", str(tiny_qwen3), "--workload", "hostile", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("llm-hostile--*--plain--*.json")
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == [IDLE, *chosen]
    assert found["conditions"]["bytes of an attack's request"] == 250_000
    for row in found["rows"]:
        extra = row["extra"]
        for kind in ("request_ms", "chat_ms", "health_ms"):
            assert 0 < extra[kind]["median"] <= extra[kind]["p95"] <= extra[kind]["p99"] <= extra[kind]["max"]
        assert extra["request_ms"]["count"] == len(row["timing"]["samples_ms"])
        assert row["timing"]["median_ms"] == pytest.approx(extra["request_ms"]["median"])
    idle, *attacked = found["rows"]
    assert "attack_answers" not in idle["extra"]
    for row in attacked:
        answers = row["extra"]["attack_answers"]
        assert answers.keys() - {CUT_OFF} == {STATUSES[row["name"]]}
        assert row["extra"]["attacks_per_second"] > 0


def test_every_attack_comes_to_the_server_while_others_are_answered():
    with fake_server() as live:
        names = [name for name in ATTACKS if name != "a costly schema"]  # the fake engine has no grammars
        with contextlib.ExitStack() as all_at_once:
            found = {name: all_at_once.enter_context(attack(_attack(live.url, name))) for name in names}
            times = waited({"url": live.url, **WAITING})
            assert not any(found.values())
        for name, answers in found.items():
            assert answers["answers"].keys() <= {STATUSES[name], CUT_OFF}
            assert sum(answers["answers"].values()) > 0
            assert answers["seconds"] > 0
        assert min(map(len, times.values())) > 1


def test_bodies_are_as_long_as_they_should_be_and_those_of_a_schema_differ():
    bodies = {name: of.bodies(300_000) for name, of in ATTACKS.items() if of.bodies}
    schemas = bodies.pop("a costly schema")
    assert max(len(bodies.pop(name)[0]) for name in ("a costly check", "16 completions")) < 6000
    assert max(map(len, schemas)) < 300
    assert len(set(schemas)) == 100
    for name, made in bodies.items():
        assert max(map(len, made)) == pytest.approx(300_000, rel=0.02), name
        assert all(body[0] + body[-1] == "{}" for body in made)


def test_an_attack_that_is_answered_otherwise_is_no_row():
    with fake_server() as live:
        with attack(_attack(live.url, "a costly schema")) as found:
            waited({"url": live.url, **WAITING})
        assert set(found["answers"]) == {"200"}
        with pytest.raises(GateError, match=r"a costly schema: .*'200'.*, expected only 400"):
            bench_hostile._answered("a costly schema", **found)


def test_a_small_request_that_is_refused_is_no_time():
    with fake_server() as live, pytest.raises(GateError, match="failed: RuntimeError: 404: .*other"):
        waited({"url": live.url, **WAITING, "model": "other"})


def test_an_attack_whose_clients_fail_is_no_row():
    with (
        pytest.raises(GateError, match=r"failed: .*ConnectError"),
        attack(_attack("http://127.0.0.1:9", "numbers")),
    ):
        pass


def test_a_model_without_a_tokenizer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(
        SHAPES, "tiny-shape", ModelConfig("qwen3", 700, 32, 64, 2, 4, 2, 8, 256, tied=True, qk_norm=True)
    )
    arguments = ["llm", "--model", "tiny-shape", "--workload", "hostile", "--out", str(tmp_path)]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "tiny-shape with --workload hostile: expected a model with a tokenizer" in " ".join(refused.stderr.split())


def test_a_spread_is_of_all_times():
    times = [float(n) for n in range(1, 102)]
    assert spread(times[::-1]) == {"count": 101.0, "median": 51.0, "p95": 96.0, "p99": 100.0, "max": 101.0}
