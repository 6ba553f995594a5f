import json
import math

import pytest
import torch

from fullstride.meanflow.training.guard import GuardCounts
from fullstride.meanflow.training.reporter import Reporter, flat_scores
from fullstride.meanflow.training.state import Position
from fullstride.runs.folder import read_metrics
from tests.meanflow.training.test_trainer import config


class Recorder:
    """A tracker that remembers what it was told."""

    def __init__(self):
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: dict[str, float]) -> None:
        self.seen.append((step, values))

    def close(self, state: str) -> None:
        self.state = state


@pytest.fixture
def reporter(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    made = Reporter(config(tmp_path, log_every=2), run, 0, 7)
    made.tracker = Recorder()  # pyright: ignore[reportAttributeAccessIssue]
    return made


METRICS = {"loss": torch.tensor(1.0), "squared_error": torch.tensor(0.5)}


def report(reporter: Reporter, step: int, loss: float, skipped: int = 1, spikes: int = 0) -> None:
    metrics = {"loss": torch.tensor(loss), "squared_error": torch.tensor(0.5)}
    reporter.step(Position(step, 0, step), metrics, lambda _: 1e-3, lambda: GuardCounts(skipped, spikes))


def test_every_second_step_and_the_last_are_reported(reporter):
    with reporter:
        for step in range(1, 8):
            report(reporter, step, float(step))
    lines = read_metrics(reporter.run)
    assert [line["step"] for line in lines] == [2, 4, 6, 7]
    assert [line["loss"] for line in lines] == [2.0, 4.0, 6.0, 7.0]
    assert all(line["images_per_second"] > 0 and line["skipped_steps"] == 1 for line in lines)
    assert [step for step, _ in reporter.tracker.seen] == [2, 4, 6, 7]
    assert reporter.tracker.seen[0][1]["train/loss"] == 2.0
    assert reporter.tracker.state == "finished"


def test_skipped_steps_are_told_once_as_they_come(reporter, capfd):
    for step, skipped in ((2, 0), (4, 3), (6, 3), (7, 4)):
        report(reporter, step, 1.0, skipped)
    assert capfd.readouterr().err.splitlines() == [
        "step 4: 3 steps skipped so far because they were not finite: 0 of them had a loss that was not finite, 3 only "
        "a gradient",
        "step 7: 4 steps skipped so far because they were not finite: 0 of them had a loss that was not finite, 4 only "
        "a gradient",
    ]
    reporter.step(Position(8, 0, 8), METRICS, lambda _: 1e-3, lambda: GuardCounts(7, 0, 2))
    assert capfd.readouterr().err.splitlines() == [
        "step 8: 7 steps skipped so far because they were not finite: 2 of them had a loss that was not finite, 5 only "
        "a gradient"
    ]


def test_spikes_are_told_once_as_they_come(reporter, capfd):
    for step, spikes in ((2, 0), (4, 2), (6, 2), (7, 9)):
        report(reporter, step, 1.0, 0, spikes)
    assert capfd.readouterr().err.splitlines() == [
        "step 4: 2 gradients so far exceeded 20 x their running average and were scaled to it",
        "step 7: 9 gradients so far exceeded 20 x their running average and were scaled to it",
    ]
    assert [line["spikes"] for line in read_metrics(reporter.run)] == [0, 2, 2, 9]


def lines_without_reasons(capfd):
    return [line.split(" because")[0] for line in capfd.readouterr().err.splitlines()]


def test_steps_skipped_before_a_run_went_on_are_not_told_again(reporter, capfd):
    """A resumed run has told them already; one that went back has fewer, and tells those that it skips anew."""
    resumed = Reporter(reporter.config, reporter.run, 2, 7, GuardCounts(3))
    for step, skipped in ((4, 3), (6, 4)):
        report(resumed, step, 1.0, skipped)
    assert lines_without_reasons(capfd) == ["step 6: 4 steps skipped so far"]
    resumed.restored(Position(2, attempt=1), "step_00000002", 6, GuardCounts(1))
    report(resumed, 4, 1.0, 2)
    assert lines_without_reasons(capfd) == ["step 4: 2 steps skipped so far"]


def test_a_full_disk_costs_no_line_where_a_checkpoint_is_restored(reporter, tmp_path, capfd):
    reporter.config.track = "tensorboard"
    with reporter:
        report(reporter, 2, 1.0)
        log = reporter.log.path
        log.rename(tmp_path / "away")
        (reporter.run / "tensorboard").write_text("no folder can be made here")
        for step in (4, 6):
            report(reporter, step, 1.0)
        reporter.restored(Position(4, attempt=1), "step_00000004", 6, GuardCounts())
        assert "track=tensorboard: cannot be opened" in capfd.readouterr().err
        (tmp_path / "away").rename(log)
    assert [line["step"] for line in read_metrics(reporter.run)] == [2, 4, 4]


def test_what_is_no_number_is_null_in_the_log_and_left_out_of_the_tracker(reporter):
    report(reporter, 2, math.nan)
    text = (reporter.run / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] is None
    ((_, values),) = reporter.tracker.seen
    assert "train/loss" not in values
    assert values["train/squared_error"] == 0.5


def test_scores_are_named_flat_numbers():
    frechet = {"label": "FD-classifier", "frechet": 2.0, "num_samples": 30}
    score = {"energy_distance": 1.5, "label_accuracy": None, "features": {"classifier": frechet}}
    assert flat_scores({"meanflow 1": score, "floor": {"energy_distance": 0.5}}) == {
        "eval/energy_distance": 1.5,
        "eval/classifier/frechet": 2.0,
        "eval/classifier/num_samples": 30.0,
        "eval/floor/energy_distance": 0.5,
    }


def test_a_restored_checkpoint_is_noted_and_what_came_after_it_forgotten(reporter):
    for step in (2, 4, 6):
        report(reporter, step, 1.0)
    reporter.evaluation(Position(4), {"meanflow 1": {"energy_distance": 1.0}})
    assert reporter.has_evaluation(4)
    reporter.restored(Position(3, attempt=1), "step_00000003", 6, GuardCounts())
    assert [line["step"] for line in read_metrics(reporter.run)] == [2, 3]
    assert read_metrics(reporter.run)[-1]["restored"] == "step_00000003"
    assert not reporter.has_evaluation(4)


def test_one_that_is_not_enabled_takes_reports_and_keeps_none(tmp_path, capfd):
    with Reporter(config(tmp_path, track="tensorboard"), tmp_path / "run", 0, 7, enabled=False) as reporter:
        # No process but the first waits for its device.
        reporter.step(Position(1, 0, 1), {}, lambda _: math.nan, pytest.fail)
        reporter.tangents(Position(1), {})
        reporter.evaluation(Position(1), {})
        reporter.restored(Position(0, attempt=1), "step_00000000", 1, GuardCounts())
    assert not any(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")
