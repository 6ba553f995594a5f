"""The numbers of a training for Prometheus, and the dashboard's names of them."""

import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fullstride.runs.trackers.tracked_run import TrackedRun
from fullstride.runs.trackers.tracker import Tracker, open_tracker


def tracked(folder: Path, name: str = "a run", step: int = 0) -> Tracker:
    return open_tracker("prometheus", TrackedRun("p", name, folder / name, {}, step, 40))


def numbers(folder: Path, name: str = "a run") -> dict[str, float]:
    families = text_string_to_metric_families((folder / name / "prometheus" / "train.prom").read_text())
    samples = [sample for family in families for sample in family.samples]
    for sample in samples:
        own = {"project": "p", "run": name, "folder": str(folder / name)}
        assert {key: value for key, value in sample.labels.items() if key != "state"} == own
    return {s.name.removeprefix("fullstride_train_") + s.labels.get("state", ""): s.value for s in samples}


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_the_file_has_the_latest_numbers_and_the_state(tmp_path, state):
    tracker = tracked(tmp_path)
    assert numbers(tmp_path)["staterunning"] == 1
    assert "loss" not in numbers(tmp_path)
    tracker.log(
        10, {"train/loss": 2.5, "train/seconds_per_step": 0.25, "train/images_per_second": 128.0, "eval/x": 1.0}
    )
    tracker.log(20, {"train/loss": 1.5, "train/rows_per_second": 64.0})
    found = numbers(tmp_path)
    expected = {"step": 20, "steps": 40, "loss": 1.5, "step_seconds": 0.25, "samples_per_second": 64, "staterunning": 1}
    assert {name: found[name] for name in expected} == expected
    assert found["resident_memory_bytes"] > 1e6
    tracker.close(state)
    ended = numbers(tmp_path)
    assert {name for name, value in ended.items() if name.startswith("state") and value} == {f"state{state}"}
    assert ended["updated_seconds"] >= found["updated_seconds"]
    assert ended["loss"] == 1.5


def test_a_resumed_run_begins_at_its_step(tmp_path):
    tracked(tmp_path, step=30).close("running")
    assert numbers(tmp_path)["step"] == 30


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool")
def test_promtool_finds_no_fault(tmp_path):
    tracked(tmp_path).log(10, {"train/loss": 2.5})
    text = (tmp_path / "a run" / "prometheus" / "train.prom").read_bytes()
    subprocess.run(["promtool", "check", "metrics"], input=text, check=True)
