import base64
import io
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from benchmarks.cli.app import app
from benchmarks.experiments import gpu_pool
from benchmarks.experiments.gpu_pool import Task
from benchmarks.experiments.meanflow import race, race_result, watch
from benchmarks.experiments.meanflow.official_code import load_official
from benchmarks.experiments.meanflow.race import WatchedTrainer
from benchmarks.experiments.meanflow.race_asked import CODES
from benchmarks.experiments.meanflow.race_result import gather
from benchmarks.experiments.meanflow.record import MARKS, Record
from benchmarks.experiments.meanflow.watch import MOMENTS, SHOWN, START, Clock, Watch
from benchmarks.harness.time_limit import Limit
from fullstride.errors import ConfigError, Preempted
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.evaluation import evaluator as evaluate
from fullstride.meanflow.evaluation.scores import SamplerScore, Score
from fullstride.meanflow.metrics.classifier import FeatureClassifier
from fullstride.meanflow.metrics.reference import choose_reference
from fullstride.meanflow.sampling.samplers import sample
from fullstride.process.signals import leaving_on_sigterm
from tests.helpers.in_process import run_in_process

STUB = Path(__file__).parents[2] / "official_stub"
ENOUGH, NONE = Limit(), Limit.of(0.0)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Use untrained features, and isolate official modules and caches from those of other tests."""

    def classifier(data, device):
        torch.manual_seed(0)
        return FeatureClassifier(1, data.num_classes).eval().requires_grad_(False)

    monkeypatch.setattr(evaluate, "reference_classifier", classifier)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = False
    for name in [name for name in sys.modules if name.partition(".")[0] in ("models", "training", "train_arg_parser")]:
        del sys.modules[name]


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_clock_counts_neither_the_start_nor_what_lies_between(monkeypatch):
    time, waits = Time(), []
    clock = Clock(lambda: waits.append(time.now), time)
    clock.go_on(0.0, None)
    for _ in range(START):
        assert not clock.running
        time.now += 7
        clock.step()
    assert clock.running
    assert clock.startup == 7 * START
    time.now += 3
    assert clock.seconds == 3
    with clock.paused() as seconds:
        time.now += 50
    assert seconds == 3
    time.now += 2
    clock.step()
    assert clock.seconds == 5
    assert len(waits) == 3


@pytest.mark.parametrize(
    "other", ["backend=graph", "channels_last=false", "model.recompute=true", "data.workers=1", "guard.check_step=true"]
)
def test_what_takes_other_time_is_another_recipe(other, tmp_path):
    own, changed = (race.RaceRequest("smoke", 1.0, tmp_path, given).recipe("fullstride") for given in ((), (other,)))
    key, _, value = other.partition("=")
    assert {name for name in own if own[name] != changed[name]} == {key}
    assert str(changed[key]).lower() == value


def test_other_pictures_of_ones_own_are_another_recipe(tmp_path):
    given = ("data.image_size=16", "data.batch_size=16")
    recipes = [
        race.RaceRequest("smoke", 1.0, tmp_path, (f"data={name}", f"data.path={path}", *given)).recipe("fullstride")
        for name in ("image_folder", "fashion_mnist")
        for path in ("a", "b")
    ]
    assert recipes[0] != recipes[1]
    assert recipes[2] == recipes[3]  # the same pictures, wherever they lie


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_samples_are_drawn_in_their_colours(channels):
    side, rng = 5, np.random.default_rng(channels)
    images = rng.integers(0, 256, (2, SHOWN, channels, side, side), dtype=np.uint8)
    marks = [
        {"shown": base64.b64encode(each.tobytes()).decode(), "channels": channels, "seconds": 60.0} for each in images
    ]
    picture = race_result._picture("fullstride", {0: {"marks": marks}})
    if channels == 4:  # latents are no picture
        assert picture is None
        return
    assert picture is not None
    drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture.png)))).reshape(2 * side, SHOWN * side, channels)
    np.testing.assert_array_equal(drawn[side : 2 * side, 3 * side : 4 * side], images[1, 3].transpose(1, 2, 0))


def test_a_law_that_is_given_takes_the_place_of_the_recipes(tmp_path):
    loss = race.RaceRequest("smoke", 1.0, tmp_path, ("loss.time_law=uniform",)).config("fullstride", 0).loss
    assert (loss.time_law, loss.logit_normal_mean, loss.meanflow_ratio) == ("uniform", -0.4, 0.75)


def test_a_record_that_does_not_say_its_settings_is_not_taken_for_one_of_these(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps({"minutes": 1.0, "marks": [{"step": 5}]}))
    assert Record(tmp_path, 1.0).values["marks"]
    with pytest.raises(ConfigError, match="settings are not recorded; give another --runs"):
        Record(tmp_path, 1.0, {"optimizer.lr": 1e-3})


def test_a_record_that_was_copied_in_part_is_named(tmp_path):
    path = tmp_path / "smoke" / "official-0" / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"minutes": 0.003, "mar')
    asked = _asked(tmp_path)
    for read in (lambda: asked.record("official", 0), asked.begun, lambda: asked.start_of("official")):
        with pytest.raises(ConfigError, match=r"official-0/record\.json: incomplete or damaged \(.*\); copy it again"):
            read()


def test_a_later_process_goes_on_where_the_first_was_and_keeps_its_start(monkeypatch):
    time = Time()
    clock = Clock(lambda: None, time)
    clock.go_on(61.0, 9.0)
    time.now += 40
    for _ in range(START):
        clock.step()
    time.now += 1
    assert (clock.seconds, clock.startup) == (62, 9)


def _asked(folder: Path, minutes: float = 0.003) -> race.RaceRequest:
    return race.RaceRequest("smoke", minutes, folder)


def test_a_training_that_is_cut_goes_on_from_its_clock_and_is_scored_at_every_mark(tmp_path):
    asked = _asked(tmp_path)
    assert not race.run("fullstride", 2, asked, NONE, None)
    record = tmp_path / "smoke" / "fullstride-2" / "record.json"
    first = json.loads(record.read_text())
    assert not first["marks"] or len(first["marks"]) < MARKS
    (step,) = first["saved"]
    (here,) = first["environments"]
    record.write_text(json.dumps(first | {"environments": [here | {"cpu": "Other"}]}))
    with pytest.raises(ConfigError, match="the runs come from different machines"):
        race.run("fullstride", 2, asked, ENOUGH, None)
    record.write_text(json.dumps(first))
    given = ["time-to-quality", "--scale", "smoke", "--minutes", "0.003", "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, [*given, "--code", "fullstride", "--seed", "2"])
    assert done.exit_code == 0, done.output
    found = json.loads(record.read_text())
    assert found["startup"] == first["startup"]
    assert found["saved"][step] == first["saved"][step]
    steps = [mark["step"] for mark in found["marks"]]
    assert len(steps) == MARKS
    assert steps == sorted(set(steps))
    seconds = [mark["seconds"] for mark in found["marks"]]
    assert seconds == sorted(seconds)
    assert all(mark["with start-up"] == mark["seconds"] + found["startup"] for mark in found["marks"])
    moments = [moment["with start-up"] for moment in found["moments"]]
    assert all(at >= share * 60 * 0.003 for at, share in zip(moments, MOMENTS, strict=True))
    assert {name: scores["NFE"] for name, scores in found["final"].items()} == {"meanflow 2": 2, "euler 50": 50}
    before = record.read_bytes()
    done = CliRunner().invoke(app, [*given, "--code", "fullstride", "--seed", "2"])
    assert "already trained" in done.output
    assert record.read_bytes() == before  # what nothing was added to is as old as it was
    done = CliRunner().invoke(app, [*given, "--collect", "--seed", "2"])
    assert done.exit_code == 0, done.output
    assert "not run: official, seed 2: no mark" in done.output
    (path,) = (tmp_path / "results").glob("experiment-time-to-quality--smoke--*.json")
    assert len(json.loads(path.read_text())["parts"][0]["rows"]) == MARKS + len(MOMENTS)


def test_the_official_loop_is_given_our_recipe_and_goes_on(tmp_path):
    asked = _asked(tmp_path)
    assert not race.run("official", 1, asked, NONE, STUB)
    loop = sys.modules["training.train_loop"]
    before = len(loop.STEPS)
    assert race.run("official", 1, asked, ENOUGH, STUB)
    assert list(range(len(loop.STEPS))) == loop.STEPS
    assert before >= START
    assert all(low >= 0 and high <= 1 and size == 32 for low, high, size in loop.RANGES)
    args = loop.ARGS[-1]
    config = asked.config("official", 1)
    assert (args.ratio, args.norm_p, args.P_mean_r, args.tr_sampler) == (0.75, 0.75, -4.0, "v1")
    assert (args.lr, args.optimizer_betas, args.ema_decay) == (config.optimizer.lr, [0.9, 0.99], 0.999)
    assert not args.compile
    saved = torch.load(tmp_path / "smoke" / "official-1" / "official.pt", weights_only=True)
    assert saved["steps"] == len(loop.STEPS)
    assert len(json.loads((tmp_path / "smoke" / "official-1" / "record.json").read_text())["marks"]) == MARKS


# Settings with a decaying learning rate.
FALLS = "optimizer.decay=cosine"
# By a clock that goes on by a second a step: minutes of which 40 % have a step for each mark.
FALLING = 0.5


def _share(step: int, minutes: float) -> float:
    """Return the share of the time used up before a step, counted from 1, by a clock that skips the first few steps."""
    return min(1.0, max(0, step - 1 - START) / (60 * minutes))


@pytest.mark.thorough
def test_a_rate_that_falls_does_so_over_the_time_of_each_training(tmp_path, ticking):
    asked = race.RaceRequest("smoke", FALLING, tmp_path, (FALLS, "optimizer.warmup_steps=10", "log_every=1"))
    rate = asked.config("fullstride", 0).optimizer.lr
    for code, share in (("fullstride", 1.0), ("fullstride-short", 0.4)):
        assert race.run(code, 0, asked, ENOUGH, None)
        lines = (tmp_path / "smoke" / f"{code}-0" / "metrics.jsonl").read_text().splitlines()
        rates = {line["step"]: line["lr"] for line in map(json.loads, lines) if "lr" in line}
        assert max(rates) == START + round(60 * FALLING * share)
        for step, found in rates.items():
            expected = 0.5 + 0.5 * math.cos(math.pi * _share(step, FALLING * share))
            assert found == pytest.approx(rate * min(1.0, step / 10) * expected)
    assert race.run("official", 0, asked, ENOUGH, STUB)
    saved = torch.load(tmp_path / "smoke" / "official-0" / "official.pt", weights_only=True)
    (last,) = (group["lr"] for group in saved["optimizer"]["param_groups"])
    # It sets the rate of the next step before it asks for its batch, which is when the clock goes on.
    assert saved["steps"] == START + 60 * FALLING
    assert last == pytest.approx(rate * (0.5 + 0.5 * math.cos(math.pi * _share(saved["steps"], FALLING))))


def test_the_rate_of_the_weights_is_the_one_that_is_told(tmp_path, ticking):
    asked = race.RaceRequest("smoke", TICKS, tmp_path, (FALLS, "optimizer.warmup_steps=1"))
    config = asked.config("fullstride", 0)
    trainer = WatchedTrainer(config, Watch(config, asked.record("fullstride", 0), ENOUGH, torch.device("cpu")))
    rates = trainer.step.body.schedule
    assert rates is not None
    assert rates(torch.tensor(50)) == 1
    trainer.watch.clock.go_on(0.5 * 60 * TICKS, 1.0)
    trainer._look_at_the_clock()
    assert rates(torch.tensor(50)) == pytest.approx(0.5)
    assert trainer.progress == pytest.approx(0.5)
    assert trainer._rate(50) == pytest.approx(0.5 * config.optimizer.lr)


# Of a clock that goes on by a second a step: a mark every other step, and some thirty steps in all.
TICKS = 20 / 60


class Ticking(Clock):
    def __init__(self, wait):
        self._steps_made = 0
        super().__init__(wait, lambda: float(self._steps_made))

    def step(self):
        self._steps_made += 1
        super().step()


class Scorer(evaluate.Evaluator):
    """Stand-in for an evaluator, whose scores have tests of their own: any number of a network will do."""

    def __init__(self, data, config, device):
        self.data, self.device, self.floor = data, device, _score(0.1)

    def sampler_score(self, model, sampler, steps, num_classes, keep=lambda images: None):
        weights = next(model.parameters())
        return SamplerScore(sampler, steps, float(steps or 0), 0.01, _score(weights.abs().mean().item()))


class Shrinking(torch.nn.Module):
    """Stand-in for a network."""

    def forward(self, z, *times, **label):
        return -z


def _score(energy: float) -> Score:
    return Score(16, 16, energy, energy, None, {})


@pytest.fixture
def ticking(monkeypatch):
    monkeypatch.setattr(watch, "Clock", Ticking)
    monkeypatch.setattr(watch, "Evaluator", Scorer)


@pytest.mark.parametrize("code", CODES)
def test_a_run_that_is_told_to_end_saves_with_its_clock_and_goes_on(code, tmp_path, monkeypatch, ticking):
    asked, seen = _asked(tmp_path, TICKS), []
    after_step = Watch.after_step

    def tell(told, step, *given):
        found = after_step(told, step, *given)
        seen.append(step)
        if len(told.record.values["marks"]) == 2 and step > told.record.values["marks"][-1]["step"]:
            signal.raise_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(Watch, "after_step", tell)
    with leaving_on_sigterm(), pytest.raises(Preempted, match="stopped; saved .*"):
        race.run(code, 0, asked, ENOUGH, STUB)
    monkeypatch.setattr(Watch, "after_step", after_step)
    stopped, path = max(seen), tmp_path / "smoke" / f"{code}-0" / "record.json"
    first = json.loads(path.read_text())
    steps = sorted(map(int, first["saved"]))
    assert steps[-1] >= stopped  # nothing that was made is lost
    assert first["saved"][str(steps[-1])] > first["marks"][-1]["seconds"]
    assert race.run(code, 0, asked, ENOUGH, STUB)
    found = json.loads(path.read_text())
    assert found["marks"][:2] == first["marks"]
    assert found["marks"][2]["step"] > steps[-1]
    assert found["startup"] == first["startup"]


@pytest.mark.parametrize("code", CODES)
def test_a_run_that_is_told_to_end_in_its_start_keeps_nothing_that_would_make_the_next_one_shorter(
    code, tmp_path, monkeypatch, ticking
):
    asked, kernel = _asked(tmp_path, TICKS), tmp_path / "smoke" / f"{code}-0" / "compiled" / "inductor" / "kernel.so"
    after_step = Watch.after_step

    def tell(told, step, *given):
        kernel.parent.mkdir(parents=True, exist_ok=True)
        kernel.touch()
        signal.raise_signal(signal.SIGTERM)
        return after_step(told, step, *given)

    monkeypatch.setattr(Watch, "after_step", tell)
    with leaving_on_sigterm(), pytest.raises((Preempted, SystemExit)):
        race.run(code, 0, asked, ENOUGH, STUB)
    assert kernel.exists()
    assert json.loads((kernel.parents[2] / "record.json").read_text())["saved"] == {}
    monkeypatch.setattr(Watch, "after_step", after_step)
    assert not race.run(code, 0, asked, NONE, STUB)
    assert not kernel.exists()
    kernel.parent.mkdir(parents=True, exist_ok=True)
    kernel.touch()
    assert not race.run(code, 0, asked, NONE, STUB)
    assert kernel.exists()  # a run that goes on compiles nothing anew


def test_kernels_of_a_run_lie_where_a_compiler_finds_them_and_no_other_run_does(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runs = [tmp_path / "plain", tmp_path / "with a blank", tmp_path / "with another blank"]
    folders = []
    for run in runs:
        run.mkdir()
        race._compile_alone(run, anew=True)
        folders.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        assert Path(os.environ["TRITON_CACHE_DIR"]).parent == folders[-1].parent
    assert folders[0] == runs[0] / "compiled" / "inductor"
    assert len(set(folders)) == 3
    assert not any(" " in str(folder) for folder in folders)
    for run, folder in zip(runs, folders, strict=True):
        folder.mkdir(parents=True)
        race._compile_alone(run, anew=False)
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == folder
        assert folder.exists()
        race._compile_alone(run, anew=True)
        assert not folder.exists()
    # The folder of another user that could guess its name would be run as code.
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) != folders[-1]
    (moved := tmp_path / "moved to a blank").mkdir()
    (moved / "compiled" / "inductor").mkdir(parents=True)
    race._compile_alone(moved, anew=False)
    assert " " not in os.environ["TORCHINDUCTOR_CACHE_DIR"]


def test_a_score_that_is_not_expected_to_fit_is_left_to_the_next_process(tmp_path, monkeypatch, ticking):
    scored, score = [], Watch.score

    def counted(told, *given):
        scored.append(told)
        told._scoring = 1e6
        return score(told, *given)

    monkeypatch.setattr(Watch, "score", counted)
    asked = _asked(tmp_path, TICKS)
    assert not race.run("official", 0, asked, Limit.of(1e5), STUB)
    assert len(scored) == 1
    record = json.loads((tmp_path / "smoke" / "official-0" / "record.json").read_text())
    assert len(record["marks"]) + len(record["moments"]) == 1
    assert max(map(int, record["saved"])) > START  # and what was trained is kept
    monkeypatch.setattr(Watch, "score", score)
    assert race.run("official", 0, asked, Limit.of(1e5), STUB)


def _keep_record_alone(run: Path) -> None:
    for path in run.iterdir():
        if path.name != "record.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_run_whose_record_alone_was_kept_begins_anew_and_loses_no_mark(tmp_path, capfd, ticking, monkeypatch):
    monkeypatch.setattr(race.RaceRequest, "start_of", lambda *_: 0.0)  # with what is known it would not be begun
    asked = _asked(tmp_path, TICKS)
    assert race.run("official", 0, asked, ENOUGH, STUB)
    run = tmp_path / "smoke" / "official-0"
    whole = json.loads((run / "record.json").read_text())
    cut = whole | {"marks": whole["marks"][:4], "moments": [], "saved": {}}
    (run / "record.json").write_text(json.dumps(cut))
    _keep_record_alone(run)
    assert not race.run("official", 0, asked, NONE, STUB)
    assert (
        "its checkpoints are gone, so it starts again; its 4 marks are kept until it has as many"
        in capfd.readouterr().err
    )
    found = json.loads((run / "record.json").read_text())
    assert (len(found["marks"]), found["before"]["marks"]) == (0, cut["marks"])
    row = gather(asked, (0,)).parts[0].rows[3]
    assert row.values["energy distance"] == {0: cut["marks"][3]["scores"]["energy distance"]}
    _keep_record_alone(run)  # and cut again, with less than before
    assert not race.run("official", 0, asked, NONE, STUB)
    assert json.loads((run / "record.json").read_text())["before"]["marks"] == cut["marks"]
    assert race.run("official", 0, asked, ENOUGH, STUB)
    found = json.loads((run / "record.json").read_text())
    assert "before" not in found
    assert len(found["marks"]) == MARKS


def test_a_run_that_is_trained_and_has_no_checkpoint_any_more_holds_nobody_up(tmp_path, capfd, ticking):
    asked = _asked(tmp_path, TICKS)
    assert race.run("fullstride", 0, asked, ENOUGH, None)
    run = tmp_path / "smoke" / "fullstride-0"
    record = json.loads((run / "record.json").read_text())
    del record["final"]["euler 50"]
    (run / "record.json").write_text(json.dumps(record))
    before = (run / "record.json").read_bytes()
    _keep_record_alone(run)
    assert not race.run("fullstride", 0, asked, ENOUGH, None)
    assert "euler 50 cannot be scored without checkpoints; delete this folder to train again" in capfd.readouterr().err
    assert (run / "record.json").read_bytes() == before
    assert gather(asked, (0,)).missing[0] == "fullstride, seed 0: the solver's score"


def test_a_run_is_not_mixed_with_one_of_other_settings(tmp_path, ticking):
    asked = _asked(tmp_path, TICKS)
    race.run("official", 0, asked, NONE, STUB)
    record = Record(tmp_path / "smoke" / "official-0", TICKS)
    record.values["marks"] = [{"seconds": 1.0}]
    record.write()
    other = race.RaceRequest("smoke", TICKS, tmp_path, ("evaluation.num_samples=8", "optimizer.lr=3e-4", "log_every=5"))
    for act in (lambda: race.run("official", 0, other, NONE, STUB), lambda: gather(other, (0,))):
        with pytest.raises(ConfigError, match=r"was begun with evaluation.num_samples=16 optimizer.lr=0.001; give"):
            act()


def test_a_seed_is_not_begun_beside_those_of_another_machine(tmp_path, ticking):
    asked = _asked(tmp_path, TICKS)
    race.run("official", 0, asked, NONE, STUB)
    path = tmp_path / "smoke" / "official-0" / "record.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"environments": [record["environments"][0] | {"cpu": "Other"}]}))
    with pytest.raises(ConfigError, match="the runs come from different machines"):
        race.run("official", 1, asked, NONE, STUB)


def test_what_is_complete_is_not_started_and_what_has_no_time_to_start_is_not_begun(tmp_path, monkeypatch, capfd):
    started: list[list[Task]] = []
    monkeypatch.setattr("benchmarks.experiments.visible_gpus.count_gpus", lambda visible=None: 2)
    monkeypatch.setattr(gpu_pool, "run_side_by_side", lambda tasks, *_: started.append(tasks) or [])
    for seed in (0, 1):
        _write(tmp_path, "official", seed, [9.0] * MARKS, start=30.0 + seed)
    _write(tmp_path, "official", 2, [9.0] * 3, start=40.0)
    (tmp_path / "smoke" / "official-2" / "official.pt").touch()
    given = ["--scale", "smoke", "--minutes", "10", "--runs", str(tmp_path), "--official", str(STUB), "--gpus", "0"]
    seeds = [word for seed in range(4) for word in ("--seed", str(seed))]
    done = CliRunner().invoke(app, ["time-to-quality", *given, *seeds])
    assert done.exit_code == 0, done.output
    least = {task.name: task.least for task in started[0] if task.name.startswith("official")}
    # The former goes on from its checkpoint; both are given what this process took to begin.
    assert least["official-3"] - least["official-2"] == pytest.approx(40)
    assert set(least) == {"official-2", "official-3"}
    assert not race.run("official", 3, _asked(tmp_path, 10.0), Limit.of(30.0), STUB)
    assert (
        "official, seed 3: not begun; its start takes about 40 s, and --limit 30 leaves less" in capfd.readouterr().err
    )


def test_curves_are_of_the_complete_seeds_which_one_that_was_cut_does_not_cut(tmp_path):
    for seed in (0, 2):
        _write(tmp_path, "official", seed, [9.0] * MARKS, start=9.0)
    _write(tmp_path, "official", 1, [1.0], start=9.0)
    (by_training, _) = gather(_asked(tmp_path, 10.0), (0, 1, 2)).curves
    assert [y for _, y in by_training.series["official"]] == [9.0] * MARKS
    assert by_training.caption.endswith("Means: official over seeds 0 and 2.")


PACE = 60.0
OTHERS = (
    *("labels", "imf-labels", "huber", "huber-labels", "huber-imf-labels"),
    *("alphaflow", "warmup", "muon", "imf-muon"),
)


def _write(
    folder: Path,
    code: str,
    seed: int,
    energy: list[float],
    start: float,
    final: dict | None = None,
    asked: race.RaceRequest | None = None,
) -> None:
    run = folder / "smoke" / f"{code}-{seed}"
    run.mkdir(parents=True)
    record = (asked or _asked(folder, MARKS * PACE / 60)).record(code, seed)
    shown = base64.b64encode(bytes(SHOWN * 8 * 8)).decode()
    record.values["marks"] = [
        {
            "step": 100 * (i + 1),
            "seconds": PACE * (i + 1),
            "with start-up": PACE * (i + 1) + start,
            "scores": {"NFE": 1.0, "energy distance": value},
            "shown": shown,
        }
        for i, value in enumerate(energy)
    ]
    record.values |= {"startup": start, "floor": {"energy distance": 0.1}, "final": final or {}}
    record.write()


def test_claims_are_judged_on_means_over_seeds_by_both_clocks(tmp_path):
    # The official code ends at a mean of 4; ours gets there at its third mark.
    for seed, last in enumerate((3.0, 5.0)):
        _write(tmp_path, "official", seed, [9.0] * 9 + [last], start=30.0)
        values = [8.0, 6.0, 3.0 + 2 * seed, *[2.2 - 0.4 * seed] * 7]
        _write(tmp_path, "fullstride", seed, values, 200.0, {"euler 50": {"energy distance": 1.9}})
        of_imf = [8.0 + seed] * 4 + [3.0 + seed] * 6
        _write(tmp_path, "fullstride-imf", seed, of_imf, 20.0, {"euler 50": {"energy distance": 3.0}})
    result = gather(_asked(tmp_path, 10.0), (0, 1))
    by_training, with_start, of_imf, _, near, near_of_imf = result.claims
    assert by_training.holds
    assert "4 is reached after 180 s" in by_training.found
    # With its start-up the official code is at 9 after ten minutes, and ours below that at its first mark, after 260 s.
    assert not with_start.holds
    assert "9 is reached after 260 s" in with_start.found
    assert near.holds
    assert near.found.endswith("= 1.05 (seeds 0 and 1)")
    assert "is reached by fullstride-imf in" in of_imf.text
    assert (of_imf.found, of_imf.holds) == ("4 is reached after 300 s (seeds 0 and 1)", False)
    assert "of one step of fullstride-imf is" in near_of_imf.text
    assert (near_of_imf.found, near_of_imf.holds) == ("3.5 / 3 = 1.17 (seeds 0 and 1)", False)
    rows = {(row.labels["code"], row.labels["mark"]): row.values for row in result.parts[0].rows}
    assert rows["official", "10"]["energy distance"] == {0: 3.0, 1: 5.0}
    names = [f"samples-{code}" for code in ("fullstride", "official", "fullstride-imf")]
    assert [picture.name for picture in result.pictures] == names
    assert result.missing == [f"fullstride-{name}, seeds 0 and 1: no mark" for name in ("imf-ema", *OTHERS)]


def test_what_is_scored_between_two_marks_is_judged_too(tmp_path):
    for code, energy in (("official", [9.0] * 8 + [3.0] * 2), ("fullstride", [8.0, 8.0, 8.0, *[2.0] * 7])):
        _write(tmp_path, code, 0, energy, start=90.0)
        record = Record(tmp_path / "smoke" / f"{code}-0", MARKS * PACE / 60)
        for share, value in zip(MOMENTS, {"official": (9.0, 5.0), "fullstride": (4.5, 2.0)}[code], strict=True):
            at = {"with start-up": share * 600, "seconds": share * 600 - 90, "step": 7}
            record.values["moments"].append(at | {"scores": {"NFE": 1.0, "energy distance": value}})
        record.write()
    result = gather(_asked(tmp_path, 10.0), (0,))
    by_training, with_start, _ = result.claims
    # By training: 3 at ten minutes; ours is below it at its fourth mark. With start-up: 5, ours at 4.5 after 240 s.
    assert by_training.found == "3 is reached after 240 s (seed 0)"
    assert with_start.found == "5 is reached after 240 s (seed 0)"
    assert with_start.holds
    rows = {(row.labels["code"], row.labels["mark"]): row.values for row in result.parts[0].rows}
    assert rows["fullstride", "40% of the time with start-up"]["energy distance"] == {0: 4.5}
    (curve,) = [curve for curve in result.curves if curve.name == "energy-distance-with-start-up"]
    assert [x for x, _ in curve.series["official"]] == sorted([*(60.0 * (i + 1) + 90 for i in range(10)), 240.0, 600.0])


def test_where_the_rate_falls_less_time_is_a_training_of_its_own(tmp_path):
    asked = race.RaceRequest("smoke", MARKS * PACE / 60, tmp_path, (FALLS,))
    ends = {"official": (3.0, 5.0), "fullstride-short": (3.5, 4.0), "fullstride": (2.0, 2.0)}
    for code, values in ends.items():
        for seed, last in enumerate(values):
            _write(tmp_path, code, seed, [9.0] * 9 + [last], 30.0, {"euler 50": {"energy distance": 1.0}}, asked)
    result = gather(asked, (0, 1))
    assert result.file_name.startswith("experiment-time-to-quality-annealed--smoke--")
    given, near = result.claims
    assert given.text.startswith("energy distance of fullstride, given 240 seconds of training, is at most")
    assert (given.found, given.holds) == ("3.75 beside 4 (seeds 0 and 1)", True)
    assert (near.found, near.holds) == ("2 / 1 = 2.00 (seeds 0 and 1)", False)
    others = ("imf", "imf-ema", *OTHERS)
    assert result.missing == [f"fullstride-{name}, seeds 0 and 1: no mark" for name in others]
    with pytest.raises(
        ConfigError,
        match="--code=fullstride-short: expected one of .*fullstride, .*official",
    ):
        _asked(tmp_path).config("fullstride-short", 0)


def test_the_other_objective_is_trained_with_all_else_alike(tmp_path, ticking):
    asked = _asked(tmp_path, TICKS)
    ours, other = asked.recipe("fullstride"), asked.recipe("fullstride-imf")
    assert {key: (ours[key], other[key]) for key in ours if ours[key] != other[key]} == {
        "loss.name": ("meanflow", "imf")
    }
    other = asked.recipe("fullstride-huber")
    assert {key: other[key] for key in ours if ours[key] != other[key]} == {"loss.weighting": "huber"}
    assert race.run("fullstride-imf-ema", 0, asked, ENOUGH, None)
    (record,) = asked.begun()
    assert record["recipe"]["loss.name"] == "imf_ema"
    assert list(record["final"]) == ["meanflow 2", "euler 50"]


def test_with_labels_all_else_is_alike_and_samples_have_those_of_the_held_out_images(tmp_path, ticking, monkeypatch):
    asked, given = _asked(tmp_path, TICKS), []
    ours, other = asked.recipe("fullstride"), asked.recipe("fullstride-labels")
    assert {key for key in ours if ours[key] != other[key]} == {"model.class_conditional"}
    monkeypatch.setattr(watch, "Evaluator", evaluate.Evaluator)
    for module in (evaluate, watch):
        # Of a simple flow in place of the network, of which a solver takes many values.
        monkeypatch.setattr(
            module, "sample", lambda _, *a, **k: given.append(k["label"].tolist()) or sample(Shrinking(), *a, **k)
        )
    assert race.run("fullstride-labels", 0, asked, ENOUGH, None)
    (record,) = asked.begun()
    assert list(record["final"]) == ["meanflow 2", "euler 50"]
    assert {len(labels) for labels in given} == {SHOWN, 16}
    held_out = load_data(asked.config("fullstride-labels", 0).data).test.labels
    expected = {SHOWN: [i % 10 for i in range(SHOWN)], 16: held_out[choose_reference(len(held_out), 16)].tolist()}
    assert all(labels == expected[len(labels)] for labels in given)


@pytest.mark.parametrize(
    "other", ["data.hflip=true", "optimizer.grad_clip=1", "ema.period=4", "loss.use_batch_time=true"]
)
def test_what_the_official_code_does_not_have_is_refused(other, tmp_path):
    asked = race.RaceRequest("gpu", 10.0, tmp_path, (other, "device=cpu", "evaluation.precision=fp32"))
    with pytest.raises(ConfigError, match=f"{other.partition('=')[0]}: the official code has no such setting"):
        asked.check("fullstride", 0, None)


def test_a_claim_without_runs_is_not_judged(tmp_path):
    _write(tmp_path, "fullstride", 0, [5.0] * 4, 9.0)
    result = gather(_asked(tmp_path, 10.0), (0, 1))
    assert {claim.holds for claim in result.claims} == {None}
    assert "fullstride, seed 0: 4 of 10 marks" in result.missing
    assert "official, seeds 0 and 1: no mark" in result.missing


def _write_fitted(folder: Path, code: str, seed: int, floor: float, distance: float) -> None:
    """Write a run whose classifier gives training images this score."""
    _write(folder, code, seed, [5.0] * MARKS, 9.0, {"euler 50": {"energy distance": 5.0, "FD-classifier": distance}})
    record = Record(folder / "smoke" / f"{code}-{seed}", MARKS * PACE / 60)
    record.values["floor"]["FD-classifier"] = floor
    for mark in record.values["marks"]:
        mark["scores"]["FD-classifier"] = distance
    record.write()


def test_each_seed_may_have_a_classifier_of_its_own_if_both_codes_have_it(tmp_path):
    for seed, floor in enumerate((3.0, 5.0)):
        for code, distance in (("fullstride", 10.0), ("official", 20.0)):
            _write_fitted(tmp_path, code, seed, floor, distance * floor)
    # Of a seed that the official code has not run nothing is judged beside it: by its classifier all is farther.
    _write_fitted(tmp_path, "fullstride", 2, 500.0, 5000.0)
    result = gather(_asked(tmp_path, 10.0), (0, 1, 2))
    assert [text for text in result.missing if "fullstride-" not in text] == ["official, seed 2: no mark"]
    floors = [row for row in result.parts[1].rows if row.labels["code"].startswith("floor")]
    assert floors[0].values["FD-classifier"] == {0: 3.0, 1: 5.0, 2: 500.0}
    (claim,) = [c for c in result.claims if "FD" in c.text and "seconds of training" in c.text]
    assert claim.found == "80 is reached after 60 s (seeds 0 and 1)"


def test_a_run_does_not_go_on_with_another_classifier(tmp_path):
    record = Record(tmp_path, 1.0)
    floor = {"energy distance": random.uniform(0.001, 0.1), "FD-classifier": random.uniform(1, 9)}
    record.rest_on(floor)
    record.write()
    again = Record(tmp_path, 1.0)
    again.rest_on({name: value * (1 + 1e-6) for name, value in floor.items()})  # another device's rounding
    assert again.values["floor"] == floor
    with pytest.raises(ConfigError, match=r"FD-classifier of training images is .*the classifier differs"):
        again.rest_on(floor | {"FD-classifier": 1.01 * floor["FD-classifier"]})
    with pytest.raises(ConfigError, match=r"has scores of FD-classifier, which was not requested now"):
        again.rest_on({"energy distance": floor["energy distance"]})


def test_distances_by_different_classifiers_are_not_compared(tmp_path):
    for code, fitted in (("fullstride", 9.0), ("official", 7.0)):
        _write_fitted(tmp_path, code, 0, fitted, 100.0)
    result = gather(_asked(tmp_path, 10.0), (0,))
    assert "FD-classifier: the same images score 7 to 9 in the runs of seed 0" in result.missing[0]
    assert {name for row in result.parts[0].rows for name in row.values} >= {"energy distance"}
    assert not any("FD-classifier" in row.values for part in result.parts for row in part.rows)
    assert not any("FD-classifier" in claim.text for claim in result.claims)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--code", "fullstride"], "expected exactly one --seed"),
        (["--code", "fullstride", "--collect"], "expected --code fullstride|official|... (one training), --gpus"),
        ([], "expected --code fullstride|official|... (one training), --gpus"),
        (["--gpus", "0,1", "--collect"], "(all trainings) or --collect"),
        (["--gpus", "0,1"], "expected --official PATH"),
        (["--code", "offical", "--seed", "0"], "did you mean official"),
        (["--code", "official", "--seed", "0"], "expected --official PATH"),
        (["--code", "official", "--seed", "0", "--official", "/nowhere"], "no meanflow/training/train_loop.py"),
        (["--code", "fullstride", "--seed", "0", "model=unet_tiny"], "the official code has only song_unet"),
        (["--collect"], "no run that reached a mark"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(given, message, tmp_path):
    start = ["time-to-quality", "--scale", "smoke", "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, [*start, *given])
    assert done.exit_code == 2
    assert message in done.output


def test_a_checkout_whose_random_numbers_are_cudas_is_refused_elsewhere(tmp_path):
    checkout = shutil.copytree(STUB, tmp_path / "checkout")
    (checkout / "meanflow" / "models" / "rng.py").touch()
    start = ["time-to-quality", "--scale", "smoke", "--runs", str(tmp_path / "runs"), "--seed", "0"]
    done = CliRunner().invoke(app, [*start, "device=cpu", "--code", "official", "--official", str(checkout)])
    assert done.exit_code == 2
    assert "meanflow/models/rng.py keeps the random state of a CUDA device" in done.output


@pytest.mark.parametrize(("scale", "minutes"), [("smoke", 0.05), ("gpu", 10.0)])
def test_a_smoke_test_trains_for_seconds(scale, minutes, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(race, "run", lambda *given: runs.append(given))
    start = ["time-to-quality", "--scale", scale, "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, [*start, "--code", "fullstride", "--seed", "0"])
    assert done.exit_code == 0, done.output
    assert [asked.minutes for _, _, asked, *_ in runs] == [minutes]


def test_both_codes_are_trained_beside_each_other_and_gathered(tmp_path, monkeypatch):
    runs, gathered = [], []
    monkeypatch.setattr("benchmarks.experiments.visible_gpus.count_gpus", lambda visible=None: 2)
    monkeypatch.setattr(gpu_pool, "run_side_by_side", run_in_process)
    monkeypatch.setattr(race, "run", lambda *given: runs.append(given))
    monkeypatch.setattr(race_result, "gather", lambda *given: gathered.append(given) or gather(*given))
    given = ["--scale", "smoke", "--minutes", "2", "--runs", str(tmp_path), "--official", str(STUB), "--limit", "90"]
    words = ["time-to-quality", *given, "--gpus", "0,1", "--seed", "3", "--seed", "1", "loss.omega=1"]
    done = CliRunner().invoke(app, words)
    assert "no run that reached a mark" in done.output  # nothing was trained in this test
    asked = race.RaceRequest("smoke", 2.0, tmp_path, ("loss.omega=1",))
    codes = ("fullstride", "official", *(f"fullstride-{name}" for name in ("imf", "imf-ema", *OTHERS)))
    pairs = [(code, seed) for seed in (3, 1) for code in codes]
    assert [(code, seed, given, official) for code, seed, given, _, official in runs] == [
        (*p, asked, STUB) for p in pairs
    ]
    assert all(limit.seconds == 90 for *_, limit, _ in runs)
    assert gathered == [(asked, (3, 1))]


def test_another_network_is_refused(tmp_path, monkeypatch):
    configs = load_official(STUB)["models.model_configs"]
    build = configs.instantiate_model

    def wider(args):
        configs.MODEL_CONFIGS["unet"]["model_channels"] *= 2
        return build(args)

    monkeypatch.setattr(configs, "instantiate_model", wider)
    with pytest.raises(ConfigError, match=r"its network has [\d,]+ weights, expected [\d,]+"):
        race.run("official", 0, _asked(tmp_path), ENOUGH, STUB)


def test_modules_of_that_name_from_elsewhere_are_not_taken_for_its(monkeypatch):
    other = ModuleType("train_arg_parser")
    other.__file__ = "/elsewhere/train_arg_parser.py"
    monkeypatch.setitem(sys.modules, "train_arg_parser", other)
    with pytest.raises(ConfigError, match="module train_arg_parser is already loaded from /elsewhere"):
        load_official(STUB)


def test_another_budget_is_not_mixed_in(tmp_path):
    Record(tmp_path, 10.0).write()
    with pytest.raises(ConfigError, match="--minutes 5: .* was begun with 10"):
        Record(tmp_path, 5.0)
