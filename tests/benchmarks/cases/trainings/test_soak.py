import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cases.trainings import soak as bench_soak
from benchmarks.cli.app import app
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import Ceilings
from fullstride.runs.folder import MetricsLog


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench_soak, "measure_ceilings", lambda *_: Ceilings(1e12, 1e11, "a product", 1, [1.0], [1.0]))
    monkeypatch.setattr(bench_soak, "PARTS", 2)


def soak(folder: Path, *words: str):
    return CliRunner().invoke(app, ["train-soak", *words, "--out", str(folder)])


@pytest.mark.thorough
@pytest.mark.parametrize("workload", ["meanflow", "bert"])
def test_trainings_are_alike_and_have_their_drift(tmp_path, workload):
    done = soak(tmp_path, "--workload", workload, "--runs", "2")
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.glob(f"train-soak--{workload}--*.json")
    found = json.loads(file.read_text())
    *parts, whole = found["rows"]
    assert [row["extra"]["trainings"] for row in parts] == [1, 2]
    assert [len(row["timing"]["samples_ms"]) for row in [*parts, whole]] == [1, 1, 2]
    assert found["gate"] == {"largest difference of a loss from the first training's": 0.0}
    assert whole["extra"]["drift"].keys() == {
        "resident_bytes", "descriptors", "threads", "python_threads", "median_ms",
    }  # fmt: skip


def test_a_training_that_ends_otherwise_ends_the_soak(tmp_path, monkeypatch):
    losses = iter([0.5, 0.5, 0.25])

    def train(folder: str) -> Path:
        log = MetricsLog(Path(folder), 0)
        log.write(1, loss=next(losses))
        return Path(folder)

    monkeypatch.setitem(bench_soak.TRAININGS, "meanflow", train)
    done = soak(tmp_path, "--runs", "4")
    assert done.exit_code == 1
    assert isinstance(done.exception, GateError | SystemExit)
    assert "training 3 ended with a loss of 0.25, the first one with 0.5" in done.output
