import json

import pytest

from fullstride.bert.training.settings import TrainSettings
from fullstride.errors import ConfigError
from fullstride.runs.folder import MetricsLog, numbered, open_folder, read_metrics, write_config
from fullstride.runs.lock import release


@pytest.mark.parametrize(
    "damage",
    ['{"step": 2, "lo', '{"step": 2, "lo\n', "\0\0\0\0\n", "[2]\n", '{"epoch": 2}\n', '{"step": "two"}\n', "\udcff\n"],
)
def test_a_line_that_a_crash_spoiled_costs_only_itself(tmp_path, damage):
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 3)]
    text = lines[0] + damage + lines[1] if damage.endswith("\n") else "".join(lines) + damage
    (tmp_path / "metrics.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    log = MetricsLog(tmp_path, 3)
    log.write(4, loss=0.5)
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 3}, {"step": 4, "loss": 0.5}]


def test_a_line_that_is_being_written_is_not_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "note": "\u2028"}\n{"step": 3, "lo')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2, "note": "\u2028"}]
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_metrics(tmp_path) == []


def test_lines_wait_for_room_on_the_disk(tmp_path, capfd):
    log = MetricsLog(tmp_path, 0)
    log.write(1, loss=1.0)
    log.path.rename(tmp_path / "away")
    log.write(2, loss=2.0)
    assert "the line is held back and written with the next" in capfd.readouterr().err
    (tmp_path / "away").rename(log.path)
    with log.path.open("a") as file:
        file.write('{"step": 2, "lo')  # half of what the disk refused
    log.write(3, loss=3.0)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_lines_that_wait_outlast_a_return_to_an_earlier_step(tmp_path):
    """Those of steps that stay: of the others neither the file nor what waits keeps any."""
    log = MetricsLog(tmp_path, 0)
    log.write(1, loss=1.0)
    log.path.rename(tmp_path / "away")
    for step in (2, 3, 4):
        log.write(step, loss=float(step))
    log.go_back(3)
    (tmp_path / "away").rename(log.path)
    with log.path.open("a") as file:
        file.write('{"step": 2, "loss": 2.0}\n{"step": 3, "lo')  # what of these a disk took before it was full
    log.go_back(3)
    assert read_metrics(tmp_path) == [{"step": step, "loss": float(step)} for step in (1, 2, 3)]
    log.go_back(1)
    log.write(2, loss=0.5)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]


def test_lines_that_wait_are_written_at_the_end_or_told_to_be_lost(tmp_path, capfd):
    log = MetricsLog(tmp_path, 0)
    log.path.rename(tmp_path / "away")
    log.write(1, loss=1.0)
    log.close()
    assert "the last 1 lines could not be written and are lost" in capfd.readouterr().err
    (tmp_path / "away").rename(log.path)
    log.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_lines_whose_metric_is_no_number_are_left_out(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step, loss in ((1, 0.5), (2, float("nan")), (3, 0.0), (4, float("inf"))):
        log.write(step, loss=loss)
    log.write(4, evaluation={})
    assert [line["step"] for line in numbered(read_metrics(tmp_path), "loss")] == [1, 3]


@pytest.mark.parametrize("given", [{}, {"overwrite": True}, {"resume": True}])
def test_a_folder_of_weights_is_neither_deleted_nor_trained_into(tmp_path, given):
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text('{"model_type": "bert"}')
    (weights / "model.safetensors").write_text("weights")
    settings = TrainSettings(output_dir=str(tmp_path), run_name="weights", **given)
    with pytest.raises(
        ConfigError, match="weights/config.json was not written by a run and would be overwritten; choose"
    ):
        open_folder(settings)
    assert (weights / "model.safetensors").read_text() == "weights"
    (weights / "config.json").unlink()
    write_config(weights, settings)
    release(open_folder(settings))
    assert (weights / "model.safetensors").exists() is not settings.overwrite


@pytest.mark.parametrize("given", [{}, {"overwrite": True}, {"resume": True}])
def test_a_file_is_no_runs_folder(tmp_path, given):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="notes is a file, expected a run's folder or nothing there"):
        open_folder(TrainSettings(output_dir=str(tmp_path), run_name="notes", **given))
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_run_behind_a_link_is_replaced_where_it_lies(tmp_path):
    """Its checkpoints are on another disk, as the new ones are to be."""
    (tmp_path / "large").mkdir()
    run = tmp_path / "run"
    run.symlink_to(tmp_path / "large")
    settings = TrainSettings(output_dir=str(tmp_path), run_name="run", overwrite=True)
    for step in range(3):
        assert open_folder(settings) == run
        write_config(run, settings)
        assert [path.name for path in run.iterdir() if path.name.startswith("step")] == []
        (run / f"step_{step}").touch()
        assert (tmp_path / "large" / f"step_{step}").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "run"]
    release(run)
