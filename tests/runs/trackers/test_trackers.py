import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fullstride.errors import ConfigError
from fullstride.runs.trackers import tracker as tracking
from fullstride.runs.trackers.tensorboard import EventFile
from fullstride.runs.trackers.tracked_run import TrackedRun
from fullstride.runs.trackers.tracker import ROWS, check_tracker, open_tracker
from tests.runs.trackers.test_tensorboard import curves

# A process of its own: trackio reads TRACKIO_DIR when it is imported, and a second run is a second process anyway.
TRACKED = """
import json, sys, pathlib
from fullstride.runs.trackers.tracked_run import TrackedRun
from fullstride.runs.trackers.tracker import open_tracker
step, points = json.loads(sys.argv[1])
config = {"optimizer": {"lr": 0.25}, "run_name": "a run"}
tracker = open_tracker("trackio", TrackedRun("p-1", "a run", pathlib.Path("."), config, step))
for at, values in points:
    tracker.log(at, values)
tracker.close()
print("trained")
"""


def track(store: Path, step: int, points: list) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TRACKED, json.dumps([step, points])]
    environment = os.environ | {"TRACKIO_DIR": str(store)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained\n")
    return done


def trackio(store: Path, *arguments: str):
    """Answer of trackio's own command."""
    command = [str(Path(sys.executable).with_name("trackio")), *arguments, "--json"]
    environment = os.environ | {"TRACKIO_DIR": str(store)}
    return json.loads(subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout)


def metric(store: Path, name: str) -> list[tuple[int, float]]:
    values = trackio(store, "get", "metric", "--project", "p-1", "--run", "a run", "--metric", name)["values"]
    return [(point["step"], point["value"]) for point in values]


def test_trackios_commands_read_a_run_that_was_resumed(tmp_path):
    losses = {10 * i: 1 / (i + 1) for i in range(1, 7)}
    first = [[step, {"train/loss": loss}] for step, loss in losses.items() if step <= 40]
    second = [[step, {"train/loss": loss}] for step, loss in losses.items() if step > 20]
    track(tmp_path, 0, first)
    # The evaluation at step 40 is new there, its loss is not.
    track(tmp_path, 20, [*second, [40, {"eval/energy_distance": 0.5}]])
    assert trackio(tmp_path, "list", "runs", "--project", "p-1")["runs"] == ["a run"]
    assert metric(tmp_path, "train/loss") == list(losses.items())
    assert metric(tmp_path, "eval/energy_distance") == [(40, 0.5)]
    config = trackio(tmp_path, "get", "run", "--project", "p-1", "--run", "a run")["config"]
    assert config["optimizer"] == {"lr": 0.25}


def test_a_trackio_store_that_fails_does_not_stop_the_training(tmp_path):
    (tmp_path / "file").touch()
    done = track(tmp_path / "file" / "store", 0, [[1, {"train/loss": 0.5}], [2, {"train/loss": 0.5}]])
    assert "Not a directory" in done.stderr


def tensorboard(run: Path, step: int = 0) -> tracking.Tracker:
    return open_tracker("tensorboard", TrackedRun("p", "r", run, {}, step))


def test_tensorboard_files_lie_in_the_runs_folder(tmp_path):
    tracker = tensorboard(tmp_path)
    for step in (100, 200):
        tracker.log(step, {"train/loss": 1 / step, "eval/energy_distance": 0.5})
    tracker.close()
    tracker = tensorboard(tmp_path, step=100)
    tracker.log(150, {"train/loss": 0.25})
    tracker.close()
    shown = curves(tmp_path / "tensorboard")
    assert shown["train/loss"] == {100: pytest.approx(0.01), 150: 0.25}
    assert shown["eval/energy_distance"] == {100: 0.5}


def test_none_leaves_nothing(tmp_path):
    tracker = open_tracker("none", TrackedRun("p", "r", tmp_path, {}))
    tracker.log(1, {"train/loss": 0.5})
    tracker.close()
    assert not list(tmp_path.iterdir())


def test_a_failing_tracker_warns_once_and_lets_the_training_go_on(tmp_path, capfd):
    file = EventFile(tmp_path / "tensorboard", 0)
    file.close()  # what is written now is refused
    tracker = tracking.Tracker("tensorboard", file)
    for step in range(3):
        tracker.log(step, {"train/loss": 0.5})
    tracker.close()
    output = capfd.readouterr()
    assert output.out == ""
    said = " ".join(output.err.split())
    assert said.count("track=tensorboard failed and is off for the rest of this run: ValueError") == 1
    assert said.endswith("; metrics.jsonl is still written")


def test_a_tracker_that_cannot_be_opened_is_refused(tmp_path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(ConfigError, match=r"track=tensorboard: cannot be opened: .*File exists.*; repair that, or use"):
        tensorboard(tmp_path)


def test_closing_twice_and_logging_after_it_harm_nothing(tmp_path, capfd):
    tracker = tensorboard(tmp_path)
    tracker.close()
    tracker.close()
    tracker.log(1, {"train/loss": 0.5})
    assert capfd.readouterr().err == ""


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    for name, row in ROWS.items():
        if row.install == tracking.TRACK:
            check_tracker(name)
        monkeypatch.setitem(sys.modules, row.package, None)
        how = r"\[track\]'" if row.install == tracking.TRACK else f"pip install {name}"
        with pytest.raises(ConfigError, match=rf"track={name}: {row.package} is not installed; run.*{how}, or use"):
            open_tracker(name, TrackedRun("p", "r", tmp_path, {}))


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"track=tensorbord: expected one of tensorboard, .*did you mean tensorboard"):
        open_tracker("tensorbord", TrackedRun("p", "r", tmp_path, {}))
