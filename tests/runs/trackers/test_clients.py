"""Weights & Biases and MLflow, by their own clients where they are installed, and by a stand-in of what is called."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fullstride.runs.trackers.tracked_run import TrackedRun
from fullstride.runs.trackers.tracker import open_tracker

CONFIG = {"optimizer": {"lr": 0.25}, "seed": 3}


def run(folder: Path, step: int = 0) -> TrackedRun:
    return TrackedRun("a project", "a run", folder, CONFIG, step, 60)


def train(name: str, folder: Path, state: str = "finished") -> None:
    """Track a run, stop it at step 40, and go on from step 20."""
    for step, last in ((0, 40), (20, 60)):
        tracker = open_tracker(name, run(folder, step))
        for at in range(step + 10, last + 1, 10):
            tracker.log(at, {"train/loss": 1 / at})
        tracker.close("stopped" if last == 40 else state)


class Client:
    """The calls of MLflow's client, which keep what they are given."""

    runs: dict[str, SimpleNamespace]

    def __init__(self):
        self.runs = Client.runs

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=name) if self.runs else None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        name = f"{experiment}/{run_name}/{len(self.runs)}"
        self.runs[name] = SimpleNamespace(data=SimpleNamespace(metrics={}), points=[], params={}, states=[])
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def get_run(self, name: str) -> SimpleNamespace:
        return self.runs[name]

    def get_metric_history(self, name: str, key: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(step=step) for at, step, _ in self.runs[name].points if at == key]

    def log_param(self, name: str, key: str, value: Any) -> None:
        self.runs[name].params[key] = value

    def log_batch(self, name: str, metrics: list[tuple]) -> None:
        for key, value, _, step in metrics:
            self.runs[name].points.append((key, step, value))
            self.runs[name].data.metrics[key] = value

    def set_terminated(self, name: str, status: str) -> None:
        self.runs[name].states.append(status)


@pytest.fixture
def mlflow(monkeypatch) -> dict[str, SimpleNamespace]:
    Client.runs = {}
    parts = {"mlflow": {}, "mlflow.tracking": {"MlflowClient": Client}, "mlflow.entities": {"Metric": lambda *a: a}}
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return Client.runs


def test_mlflow_goes_on_with_a_resumed_run(tmp_path, mlflow):
    train("mlflow", tmp_path, "failed")
    (kept,) = mlflow.values()
    assert [(step, value) for _, step, value in kept.points] == [(at, 1 / at) for at in range(10, 61, 10)]
    assert kept.params == {"optimizer.lr": 0.25, "seed": 3}
    assert kept.states == ["KILLED", "RUNNING", "FAILED"]
    open_tracker("mlflow", run(tmp_path)).close()  # from its first step, it is another run
    assert len(mlflow) == 2


def test_wandb_goes_on_with_a_resumed_run(tmp_path, monkeypatch):
    begun, ended, points = [], [], []

    def init(**given: Any) -> SimpleNamespace:
        begun.append(given)
        return SimpleNamespace(
            id=given["id"] or f"id-{len(begun)}",
            log=lambda values, step: points.append((step, values)),
            finish=lambda exit_code: ended.append(exit_code),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    train("wandb", tmp_path, "failed")
    assert [(given["id"], given["resume"]) for given in begun] == [(None, None), ("id-1", "allow")]
    assert begun[0] | {"project": "a project", "name": "a run", "config": CONFIG, "dir": str(tmp_path)} == begun[0]
    assert points[0] == (10, {"train/loss": 0.1})
    assert ended == [0, 1]  # a stopped run can go on, a failed one has failed


def test_mlflows_own_client(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    train("mlflow", tmp_path)
    client = tracking.MlflowClient()
    (kept,) = client.search_runs([client.get_experiment_by_name("a project").experiment_id])
    history = client.get_metric_history(kept.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(at, 1 / at) for at in range(10, 61, 10)]
    assert kept.info.status == "FINISHED"
    assert kept.info.run_name == "a run"
    assert kept.data.params == {"optimizer.lr": "0.25", "seed": "3"}


def histories(path: Path) -> list[dict[str, str]]:
    """The rows of a run of Weights & Biases, from its file: a log of LevelDB's format whose one block is not full."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    data, at, found = path.read_bytes(), 7, []
    while at < len(data):
        end = at + 7 + int.from_bytes(data[at + 4 : at + 6], "little")
        record = Record.FromString(data[at + 7 : end])
        found += [{item.key or item.nested_key[0]: item.value_json for item in record.history.item}]
        at = end
    return [row for row in found if row]


def test_wandbs_own_client_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    train("wandb", tmp_path)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1
    rows = [row for path in files for row in histories(path)]
    assert [int(row["_step"]) for row in rows] == [10, 20, 30, 40, 30, 40, 50, 60]
    assert [float(row["train/loss"]) for row in rows] == pytest.approx([1 / int(row["_step"]) for row in rows])
