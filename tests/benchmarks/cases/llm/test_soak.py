import json
from functools import partial
from multiprocessing import Pipe

import pytest
from typer.testing import CliRunner

from benchmarks.cases.llm import shared as bench_shared
from benchmarks.cases.llm import soak as bench_soak
from benchmarks.cases.llm import soak_clients
from benchmarks.cases.llm.soak_clients import KINDS, soak
from benchmarks.cli.app import app
from fullstride.llm.engine import EngineConfig
from fullstride.measure.roofline import Ceilings
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.live import fake_server

pytestmark = pytest.mark.usefixtures("compiled_soon")


@pytest.mark.thorough
def test_a_soak_has_rows_of_its_parts_and_the_drift(tiny_qwen3, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_soak, "PARTS", 3)
    ceilings = Ceilings(1e12, 1e11, "a product", 1, [1.0], [1.0])
    monkeypatch.setattr(bench_soak, "jax_ceilings", lambda *_: ceilings)
    monkeypatch.setattr(bench_shared, "EngineConfig", partial(EngineConfig, max_length=48, max_sequences=4))
    arguments = ["llm", "--model", str(tiny_qwen3), "--workload", "soak", "--minutes", "0.02", "--adapters", "1"]
    arguments += ["--quantize", "fp8"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("llm-soak--*.json")
    found = json.loads(file.read_text())
    *parts, whole = found["rows"]
    assert len(parts) == 3
    for row in parts:
        extra = row["extra"]
        assert extra["requests"].keys() == KINDS.keys()
        assert min(extra["requests"].values()) > 0
        assert extra["resident_bytes"] > 1e7
        assert extra["compiles"] == parts[0]["extra"]["compiles"]
    assert [row["extra"]["hours"] for row in parts] == sorted(row["extra"]["hours"] for row in parts)
    drift = whole["extra"]["drift"]
    assert drift.keys() == {"resident_bytes", "descriptors", "threads", "python_threads", "median_ms", "p95_ms"}
    assert drift["p95_ms"]["last"] == parts[-1]["extra"]["request_ms"]["p95"]
    assert found["conditions"]["minutes"] == pytest.approx(0.02)
    assert found["conditions"]["quantize"] == "fp8"


def test_streams_that_are_left_are_aborted_and_an_error_ends_the_soak(monkeypatch):
    monkeypatch.setattr(soak_clients, "CLIENTS", 3)
    asked = {"models": ["fake"], "vocab": 120, "prompt": 5, "seconds": 0.3, "parts": 2}
    ours, line = Pipe()
    with fake_server(FakeEngine(blocks=64, delay=0.002)) as live:
        soak(line, asked | {"url": live.url})
        text = live.app.state.server.metrics.text().decode()
        with pytest.raises(RuntimeError, match="404"):
            soak(line, asked | {"url": live.url, "models": ["other"]})
    assert 'requests_aborted_total{reason="disconnect"} ' in text
    parts = [ours.recv(), ours.recv()]
    assert [part["counts"].keys() for part in parts] == [KINDS.keys()] * 2
    assert all(len(part["times"]) == part["counts"]["whole"] for part in parts)
