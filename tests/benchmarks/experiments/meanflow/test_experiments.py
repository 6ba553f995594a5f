import dataclasses
import gc
import json
import multiprocessing
import shutil
import signal
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli.app import app
from benchmarks.experiments import gpu_pool
from benchmarks.experiments.meanflow import jobs, phase
from benchmarks.experiments.meanflow.jobs import final, run_folder, work_off
from benchmarks.experiments.meanflow.phase import ExperimentRequest, run
from benchmarks.experiments.meanflow.phase_rows import FLOOR, by_evaluations
from benchmarks.experiments.meanflow.phases import PHASES
from benchmarks.experiments.meanflow.spec import SCALES, TrainingJob
from benchmarks.harness.result_paths import SEEDS, results_folder
from benchmarks.harness.seeds import ExperimentResult, Outcome, PartResult
from benchmarks.harness.time_limit import Limit
from fullstride.errors import ConfigError, Preempted
from fullstride.meanflow.evaluation import evaluator as evaluate
from fullstride.meanflow.metrics.classifier import FeatureClassifier
from fullstride.meanflow.sampling.generate import load_generator
from fullstride.meanflow.training.trainer import Trainer
from fullstride.process.signals import leaving_on_sigterm
from fullstride.runs.atomic_files import replace_file
from fullstride.runs.lock import locked
from tests.helpers.in_process import run_in_process
from tests.helpers.time_over import over_within


def _classifier(data, device):
    torch.manual_seed(0)
    return FeatureClassifier(1, data.num_classes).eval().requires_grad_(False)


def _shrinking(*given):
    """Load what was trained with a velocity in place of its network, of which samplers take hundreds of values."""
    generator = load_generator(*given)
    generator.model.forward = lambda z, *times, **label: -z
    return generator


def _quick(patched) -> None:
    patched.setattr(evaluate, "reference_classifier", _classifier)
    patched.setattr(jobs, "load_generator", _shrinking)


@pytest.fixture(autouse=True)
def _untrained(monkeypatch):
    """Use untrained features and a simple flow: only the bookkeeping is tested."""
    _quick(monkeypatch)


@pytest.fixture(scope="module")
def phase2(tmp_path_factory) -> Path:
    """Return finished runs of two seeds."""
    folder = tmp_path_factory.mktemp("phase2")
    with pytest.MonkeyPatch.context() as patched:
        _quick(patched)
        run("phase2", ExperimentRequest("smoke", seeds=(0, 1), runs=folder), folder / "results")
    return folder


def _job(phase, part: str, arm: int, scale: str, seed: int = 0) -> TrainingJob:
    found = next(p for p in phase.parts if p.name == part)
    return TrainingJob.of(found, found.arms[arm], scale, seed, "runs")


MACHINE = {"cpu": "AMD EPYC", "cores": 2, "gpu": None}
PHASE2, PHASE3, PHASE4, PHASE5, PHASE6, PHASE7 = PHASES.values()
RESULT = ExperimentResult("phase3", "Made", "About.", "smoke", "cpu", {}, [], MACHINE)
OTHERS = [f"objective-{what}" for what in ("labels", "unweighted", "constant")]
PARTS = {part.name: part for phase in PHASES.values() for part in phase.parts}


@pytest.mark.parametrize("scale", SCALES)
def test_arms_of_a_part_differ_in_what_is_compared_alone(scale):
    for part in PARTS.values():
        settings = [TrainingJob.of(part, arm, scale, 0, "runs").settings for arm in part.arms]
        assert len({str(sorted(found.items())) for found in settings}) == len(part.arms)
        for key in ("data", "preset", "model", "data.batch_size", "optimizer.lr", "device"):
            assert len({found.get(key) for found in settings}) == 1
        jobs = [TrainingJob.of(part, arm, scale, 0, "runs") for arm in part.arms]
        taught = [job for job in jobs if job.teacher is not None]
        # A teacher's own training counts with its pupil's.
        alone = [job for job in jobs if job.settings not in [one.teacher.settings for one in taught if one.teacher]]
        epochs = [int(job.settings["epochs"]) + int((job.teacher or job).settings["epochs"]) for job in alone]
        whole = {e if job.teacher else e // 2 for e, job in zip(epochs, alone, strict=True)}
        assert len(whole) == 1 or scale == "smoke"


def test_one_arm_is_run_with_its_teacher():
    asked = ExperimentRequest("smoke", ("newer",), (0,), arms=("taught by the flow, half as long",))
    asked.check("phase7")
    found = [training.arm.name for training in phase.trainings(PHASE7, asked)]
    assert found == ["flow, half as long", "taught by the flow, half as long"]
    with pytest.raises(ConfigError, match="--arm"):
        ExperimentRequest("smoke", ("newer",), (0,), arms=("flow",)).check("phase7")


def test_a_pupil_is_named_by_its_teachers_run_and_waits_for_it():
    pupil = _job(PHASE7, "newer", -1, "gpu")
    assert pupil.teacher is not None
    assert pupil.teacher.config.loss.name == "mse"
    assert pupil.config.loss.teacher == f"runs/{pupil.teacher.config.run_name}"
    elsewhere = TrainingJob.of(PARTS["newer"], PARTS["newer"].arms[-1], "gpu", 0, "other/runs")
    assert elsewhere.config.run_name == pupil.config.run_name
    assert jobs._told(jobs.Laboratory(), jobs.Training(PARTS["newer"], PARTS["newer"].arms[-1], pupil)) is None


@pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))
def test_the_scale_of_a_gpu_is_a_configuration_that_can_be(part):
    config = TrainingJob.of(part, part.arms[-1], "gpu", 0, "runs").config
    assert (config.device, config.precision, config.resume) == ("cuda", "bf16", True)


def test_arms_are_what_their_names_say():
    ratios = [_job(PHASE4, "ratio", arm, "cpu").settings["loss.meanflow_ratio"] for arm in range(4)]
    assert ratios == ["0", "0.25", "0.5", "0.75"]
    assert _job(PHASE2, "overfit", 0, "cpu").config.loss.name == "mse"
    assert _job(PHASE3, "weighting", 1, "cpu").config.loss.weighting_power == 0
    laws = [_job(PHASE4, "times", arm, "cpu").settings for arm in range(4)]
    assert [law["loss.time_law"] for law in laws] == ["v0", "v0", "v1", "uniform"]
    normal = [(law["loss.logit_normal_mean"], law["loss.logit_normal_std"]) for law in laws[:3]]
    assert normal == [("-0.4", "1.0"), ("-2.0", "2.0"), ("-0.6", "1.6")]
    read = [_job(PHASE4, "times", 3, scale).config.loss for scale in SCALES]
    assert {(law.time_law, law.logit_normal_mean, law.logit_normal_std) for law in read} == {("uniform", -0.4, 1.0)}
    for scale in ("cpu", "gpu"):
        parts = [_job(PHASE5, part, 1, scale).config for part in ("objective", *OTHERS)]
        assert {config.loss.name for config in parts} == {"imf"}
        assert [config.loss.weighting_power for config in parts] == [0.75, 0.75, 0, 0.75]
        assert [config.optimizer.decay for config in parts] == ["cosine", "cosine", "cosine", "constant"]
        assert [config.model.class_conditional for config in parts] == [False, True, False, False]
        weights = [[_job(PHASE6, part, arm, scale).config for arm in range(3)] for part in ("weight", "weight-labels")]
        for configs, labels in zip(weights, (False, True), strict=True):
            assert [config.loss.weighting for config in configs] == ["adaptive", "huber", "huber"]
            assert [config.loss.name for config in configs] == ["meanflow", "meanflow", "imf"]
            assert {config.model.class_conditional for config in configs} == {labels}


def test_one_training_serves_every_part_that_asks_for_it():
    weighted, overfit = _job(PHASE3, "weighting", 0, "cpu", 1), _job(PHASE2, "overfit", 2, "cpu", 1)
    assert weighted.config.run_name == overfit.config.run_name
    assert _job(PHASE4, "ratio", 3, "cpu").config.run_name == _job(PHASE4, "times", 1, "cpu").config.run_name
    labelled = {scale: _job(PHASE5, "objective-labels", 0, scale).config.run_name for scale in ("cpu", "gpu")}
    assert labelled["cpu"] == _job(PHASE3, "solvers", 0, "cpu").config.run_name
    assert labelled["gpu"] == _job(PHASE4, "power", 2, "gpu").config.run_name
    weighed = _job(PHASE6, "weight", 0, "gpu").config.run_name
    assert weighed == _job(PHASE5, "objective", 0, "gpu").config.run_name
    other = _job(PHASE2, "overfit", 2, "cpu", 2).config.run_name
    assert other.rpartition("-")[0] == overfit.config.run_name.rpartition("-")[0]
    assert other != overfit.config.run_name


@pytest.mark.parametrize(
    ("folder", "parts", "seeds"),
    [("", (*PHASE2.parts, *PHASE3.parts[1:], *PHASE4.parts), SEEDS), ("solvers", PHASE3.parts[:1], (0, 1))],
)
def test_what_was_recorded_is_still_found_by_its_name(folder, parts, seeds):
    recorded = Path(__file__).parents[4] / "benchmarks" / "records" / folder / "gpu"
    wanted = [TrainingJob.of(part, arm, "gpu", seed, "runs") for part in parts for arm in part.arms for seed in seeds]
    assert [job.config.run_name for job in wanted if not (recorded / job.config.run_name).is_dir()] == []


def test_a_finished_seed_is_not_run_again_and_what_is_missing_is_named(phase2, tmp_path, monkeypatch):
    shutil.copytree(phase2, tmp_path, dirs_exist_ok=True)
    asked = ExperimentRequest("smoke", seeds=(0, 1), runs=tmp_path)
    (path,) = (tmp_path / "results").iterdir()
    first = json.loads(path.read_text())
    monkeypatch.setattr(jobs, "Trainer", None)
    assert json.loads(run("phase2", asked, tmp_path / "results").read_text())["parts"] == first["parts"]
    with pytest.raises(TypeError, match="NoneType"):
        run("phase2", dataclasses.replace(asked, seeds=(1, 4)), tmp_path / "results")  # which would train
    monkeypatch.setattr(jobs.Laboratory, "run", lambda *given: pytest.fail("trained"))
    for scores in tmp_path.rglob("scores.json"):
        kept = json.loads(scores.read_text())
        scores.write_text(json.dumps(kept | {"environments": [kept["environments"][0] | {"cpu": "Other"}]}))
    with pytest.raises(ConfigError, match="the runs come from different machines"):
        run("phase2", dataclasses.replace(asked, seeds=(1, 4)), tmp_path / "results")
    both = dataclasses.replace(asked, seeds=(1, 4), collect=True)
    found = json.loads(run("phase2", both, tmp_path / "results").read_text())
    assert found["missing"] == [f"overfit, {arm.name}, seed 4" for arm in PHASE2.parts[0].arms]
    assert list(found["parts"][0]["rows"][0]["metrics"]["energy distance"]["seeds"]) == ["1"]


def test_scores_that_were_copied_in_part_are_named(phase2, tmp_path):
    shutil.copytree(phase2, tmp_path / "runs")
    path = sorted((tmp_path / "runs").rglob("scores.json"))[0]
    path.write_bytes(path.read_bytes()[:50])
    ended = CliRunner().invoke(app, ["phase2", "--scale=smoke", "--collect", f"--runs={tmp_path}/runs"])
    assert ended.exit_code == 2
    assert f"error: {path}: incomplete or damaged (" in ended.output
    assert "copy it again, or delete it" in ended.output


@pytest.mark.parametrize("other", ["evaluation.precision=bf16", "evaluation.features=[classifier]"])
def test_scores_of_another_evaluation_are_not_taken_for_those_that_are_asked_for(phase2, tmp_path, monkeypatch, other):
    shutil.copytree(phase2, tmp_path, dirs_exist_ok=True)
    scored = []
    found = {"found": {"NFE": 1.0, "energy distance": 7.0}, "floor": {"energy distance": 0.0}}
    monkeypatch.setattr(jobs, "Trainer", None)  # the networks are there
    monkeypatch.setattr(jobs.Laboratory, "_scored", lambda self, *given: scored.append(given) or found)
    for overrides in ((), (other,), (other,)):
        asked = ExperimentRequest("smoke", seeds=(0, 1), runs=tmp_path, overrides=overrides)
        part = json.loads(run("phase2", asked, tmp_path / "results").read_text())["parts"][0]
        assert (part["rows"][0]["metrics"]["energy distance"]["mean"] == 7.0) == bool(overrides)
    assert len(scored) == 3 * 2 * 2  # of each training by each sampler, once


def test_scores_by_another_classifier_stand_beside_no_others(phase2, tmp_path):
    shutil.copytree(phase2, tmp_path, dirs_exist_ok=True)
    asked = ExperimentRequest("smoke", seeds=(0, 1), runs=tmp_path, collect=True)
    (path,) = (tmp_path / "results").iterdir()
    before = json.loads(path.read_text())
    assert before["missing"] == []

    def give(floor, seeds, arms):
        for training in phase.trainings(PHASE2, dataclasses.replace(asked, seeds=seeds))[:arms]:
            file = run_folder(training.job) / "scores.json"
            scores = json.loads(file.read_text())
            for one in scores["samplers"].values():
                one["floor"]["FD-classifier"] = floor
            file.write_text(json.dumps(scores))

    give(2.0, (0,), 3)  # a seed may have one of its own
    assert json.loads(run("phase2", asked, tmp_path / "results").read_text())["missing"] == []
    give(2.5, (0,), 1)
    found = json.loads(run("phase2", asked, tmp_path / "results").read_text())
    what = "the same images score 2 to 2.5 in the runs of seed 0, which had different classifiers"
    assert found["missing"][0].startswith(f"overfit, FD-classifier: {what}")
    assert found["missing"][1:] == ["overfit, labels right: by different classifiers, too"]
    for row, known in zip(found["parts"][0]["rows"], before["parts"][0]["rows"], strict=True):
        assert known["metrics"].keys() - row["metrics"].keys() == {"FD-classifier", "labels right"}
        assert row["metrics"]["energy distance"] == known["metrics"]["energy distance"]


def test_a_part_that_overrides_cannot_be_of_keeps_no_other_from_being_gathered(tmp_path):
    asked = ExperimentRequest(
        "smoke", ("objective-labels",), (0,), runs=tmp_path, overrides=("loss.label_dropout=0.1",)
    )
    found = json.loads(run("phase5", asked, tmp_path / "results").read_text())
    assert {part["name"]: len(part["rows"]) for part in found["parts"] if part["rows"]} == {"objective-labels": 13}
    given = "loss.omega=1.0 loss.kappa=0.0 loss.label_dropout=0.1"
    why = f"not with these overrides ({given}: expected model.class_conditional=true with guidance)"
    names = [part.name for part in PHASE5.parts if part.name != "objective-labels"]
    assert found["missing"] == [f"{name}: {why}" for name in names]
    with pytest.raises(ConfigError, match="loss.label_dropout=0.1: expected model.class_conditional=true"):
        run("phase5", dataclasses.replace(asked, parts=()), tmp_path / "results")


def test_gpus_share_the_trainings_and_what_they_made_is_gathered(tmp_path, monkeypatch):
    started, runs, gathered = [], [], []

    def start(tasks, *rest):
        started.append((len(tasks), *rest))
        return run_in_process(tasks, *rest)

    monkeypatch.setattr("benchmarks.experiments.visible_gpus.count_gpus", lambda visible=None: 2)
    monkeypatch.setattr(gpu_pool, "run_side_by_side", start)
    monkeypatch.setattr(phase, "run", lambda *given: runs.append(given))
    monkeypatch.setattr(phase, "gathered", lambda experiment, asked: gathered.append(asked) or RESULT)
    words = "phase3 --scale smoke --part solvers --gpus 0,0,1"
    given = [*words.split(), "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, [*given, "--seed", "5", "--seed", "6"])
    assert done.exit_code == 0, done.output
    assert "--gpus 0,0,1: device=cpu: each training uses its share of the cores and no GPU" in done.stderr
    assert [(count, gpus) for count, gpus, *_ in started] == [(2, ["0", "0", "1"])]  # no more than there are trainings
    both = ExperimentRequest("smoke", ("solvers",), (5, 6), runs=tmp_path)
    assert [given[:3] for given in runs] == [("phase3", both, tmp_path / "logs" / "results")] * 2
    assert gathered == [dataclasses.replace(both, collect=True)]
    assert list((tmp_path / "results").glob("experiment-phase3--smoke--*.json"))
    done = CliRunner().invoke(app, [*given, "--collect"])
    assert done.exit_code == 2
    assert "--collect runs nothing; remove one of the two" in done.output


class Counted(jobs.Laboratory):
    """Laboratory that trains nothing: it records the requested trainings and the files of finished ones."""

    made: list[str]
    diverges = "0.25"

    def run(self, job, samplers):
        Counted.made.append(job.config.run_name)
        if job.settings["loss.meanflow_ratio"] == self.diverges:
            raise FloatingPointError("no loss is finite")
        found = {"found": {"energy distance": 1.0}}
        scores = {"samplers": {jobs._key(job.config, one): found for one in samplers}, "squared_error": 1.0}
        replace_file(run_folder(job) / "scores.json", json.dumps(scores | {"training_seconds": 1.0}))
        return scores | {"training_seconds": 1.0}


def test_what_another_process_is_at_is_left_to_it_and_what_diverges_keeps_no_other(tmp_path, monkeypatch, capfd):
    Counted.made = []
    monkeypatch.setattr(jobs, "Laboratory", Counted)
    wanted = phase.trainings(PHASE4, ExperimentRequest("smoke", ("ratio", "times"), (0,), runs=tmp_path))
    names = [training.job.config.run_name for training in wanted]
    assert names[3] == names[5]  # ratio 0.75 is the second law
    elsewhere = run_folder(wanted[2].job)
    elsewhere.mkdir(parents=True)
    with locked(elsewhere), pytest.raises(FloatingPointError, match="no loss is finite"):
        work_off(wanted, "phase4")
    assert Counted.made == [name for i, name in enumerate(names) if i not in (2, 5)]
    told = capfd.readouterr().err
    assert "phase4: in progress in other processes: ratio, ratio 0.5, seed 0\n" in told
    assert "ratio, ratio 0.25, seed 0: diverged: no loss is finite" in told
    assert "times, logit-normal(-2, 2), ordered, seed 0: already done, meanflow 1: energy distance 1" in told
    assert phase.count_missing("phase4", ExperimentRequest("smoke", ("ratio", "times"), (0,), runs=tmp_path)) == 2
    work_off([training for training in wanted if training.job.settings["loss.meanflow_ratio"] != "0.25"], "phase4")
    assert Counted.made[6:] == [names[2]]


def test_processes_that_share_a_folder_make_every_training_once(tmp_path):
    asked = ExperimentRequest("smoke", ("multiclass",), (0, 1), runs=tmp_path)
    context = multiprocessing.get_context("fork")
    lanes = [context.Process(target=_lane, args=(asked, tmp_path / f"{i}")) for i in range(2)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    assert [lane.exitcode for lane in lanes] == [0, 0]
    made = sorted(line for i in range(2) for line in (tmp_path / f"{i}").read_text().split())
    assert made == sorted(training.job.config.run_name for training in phase.trainings(PHASE3, asked))


def _lane(asked, log):
    """Run a process of `--gpus`, which records its trainings; each takes a while."""

    class Written(Counted):
        diverges = "none"

        def run(self, job, samplers):
            time.sleep(0.2)
            with log.open("a") as file:
                file.write(f"{job.config.run_name}\n")
            return super().run(job, samplers)

    log.touch()
    Counted.made, jobs.Laboratory = [], Written
    work_off(phase.trainings(PHASE3, asked), "phase3")
    while phase.count_missing("phase3", asked):
        work_off(phase.trainings(PHASE3, asked), "phase3")


def test_what_is_finished_when_the_time_is_over_is_gathered_and_the_rest_goes_on(tmp_path, monkeypatch):
    asked, scored, ends, over = ExperimentRequest("smoke", seeds=(0,), runs=tmp_path), [], [True], []
    monkeypatch.setattr(Limit, "left", property(lambda limit: -1.0 if over else 1000.0))
    score = jobs.Laboratory._scored

    def slow(*given):
        scored.append(given)
        if len(scored) == 4:  # the last of the second training
            over.extend(ends)
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("went on")
        return score(*given)

    monkeypatch.setattr(jobs.Laboratory, "_scored", slow)
    with pytest.raises(
        Preempted, match="stopped in scoring euler 16, 16 samples; to begin it again, run the same command"
    ):
        run("phase2", asked, tmp_path / "results", Limit.of(1000.0))
    (path,) = (tmp_path / "results").iterdir()
    found = json.loads(path.read_text())
    assert found["missing"] == ["overfit, ratio 0, seed 0: the score of euler 16", "overfit, ratio 0.25, seed 0"]
    rows = [(row["labels"]["training"], row["labels"]["sampler"]) for row in found["parts"][0]["rows"]]
    whole = ("flow matching, MSE", "meanflow 1"), ("flow matching, MSE", "euler 16")
    assert rows == [*whole, ("ratio 0", "meanflow 1"), (FLOOR, "")]
    path.unlink()
    del scored[0], ends[:], over[:]
    with pytest.raises(Preempted):  # from outside: at once
        run("phase2", asked, tmp_path / "results", Limit.of(1000.0))
    assert not path.exists()
    assert json.loads(run("phase2", asked, tmp_path / "results").read_text())["missing"] == []
    assert len(scored) == 3 + 1 + 3


def test_what_is_finished_is_gathered_where_the_time_is_over_with_nothing_to_save(tmp_path, monkeypatch):
    asked, begun, over = ExperimentRequest("smoke", seeds=(0,), runs=tmp_path), [], []
    monkeypatch.setattr(Limit, "left", property(lambda limit: -1.0 if over else 1000.0))

    class Slow(Trainer):
        def __init__(self, config, **given):
            begun.append(config)
            if len(begun) == 3:
                over.append(True)
                signal.raise_signal(signal.SIGTERM)  # as the limit does at its end
                pytest.fail("went on")
            super().__init__(config, **given)

    monkeypatch.setattr(jobs, "Trainer", Slow)
    with leaving_on_sigterm(), pytest.raises(Preempted, match="--limit 1000: stopped; the same command goes on"):
        run("phase2", asked, tmp_path / "results", Limit.of(1000.0))
    (path,) = (tmp_path / "results").iterdir()
    assert json.loads(path.read_text())["missing"] == ["overfit, ratio 0.25, seed 0"]


def test_a_training_whose_scores_alone_were_kept_is_made_again_if_one_is_missing(tmp_path, capfd):
    part = PHASE2.parts[0]
    job = TrainingJob.of(part, part.arms[2], "smoke", 0, str(tmp_path))
    whole = jobs.Laboratory().run(job, part.samplers)
    assert all(score["sampling"]["seconds"] > 0 for score in whole["samplers"].values())
    path = tmp_path / job.config.run_name / "scores.json"
    shutil.rmtree(path.parent / "checkpoints")
    assert jobs.Laboratory().run(job, part.samplers) == whole
    missing = whole["samplers"].pop("euler 16, 16 samples")
    path.write_text(json.dumps(whole | {"squared_error": 1e9}))
    found = jobs.Laboratory().run(job, part.samplers)
    assert "and its checkpoints are gone; training it again" in capfd.readouterr().err
    assert found["squared_error"] < 1e9
    assert found["samplers"]["euler 16, 16 samples"]["floor"] == missing["floor"]
    assert len(found["samplers"]) == 2


def test_scores_of_a_training_that_is_made_again_stay_until_it_has_as_many(phase2, tmp_path, monkeypatch):
    shutil.copytree(phase2, tmp_path, dirs_exist_ok=True)
    asked = ExperimentRequest("smoke", seeds=(0,), runs=tmp_path)
    part = PHASE2.parts[0]
    job = TrainingJob.of(part, part.arms[0], "smoke", 0, asked.root)
    path = run_folder(job) / jobs.SCORES
    shutil.rmtree(run_folder(job) / "checkpoints")
    before = json.loads(path.read_text())
    del before["samplers"]["euler 16, 16 samples"]
    path.write_text(json.dumps(before))
    monkeypatch.setattr(jobs.Laboratory, "_scored", lambda *given: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Preempted):
        jobs.Laboratory().run(job, part.samplers)
    again = json.loads(path.read_text())
    assert again["samplers"] == {}
    assert again["squared_error"] > 0
    assert jobs.begun(job, part.samplers) == before
    collected = run("phase2", dataclasses.replace(asked, collect=True), tmp_path / "results")
    assert json.loads(collected.read_text())["missing"] == [
        "overfit, flow matching, MSE, seed 0: the score of euler 16"
    ]
    monkeypatch.setattr(jobs.Laboratory, "_scored", lambda *given: {"found": {"NFE": 7.0}, "floor": {}})
    whole = jobs.Laboratory().run(job, part.samplers)
    assert whole == jobs.begun(job, part.samplers) == json.loads(path.read_text())
    assert jobs.EARLIER not in whole
    assert {score["found"]["NFE"] for score in whole["samplers"].values()} == {7.0}


def test_a_training_took_what_all_processes_took_for_it(tmp_path, monkeypatch):
    part = PHASE2.parts[0]
    job = TrainingJob.of(part, part.arms[0], "smoke", 0, str(tmp_path))

    class Stopped(Trainer):
        def _heed(self):
            time.sleep(2.0)
            signal.raise_signal(signal.SIGTERM)
            super()._heed()

    monkeypatch.setattr(jobs, "Trainer", Stopped)
    start = time.perf_counter()
    with pytest.raises(Preempted):
        jobs.Laboratory().run(job, part.samplers)
    first = json.loads((tmp_path / job.config.run_name / "scores.json").read_text())["spent_seconds"]
    assert 2 < first <= time.perf_counter() - start
    monkeypatch.setattr(jobs, "Trainer", Trainer)
    scores = jobs.Laboratory().run(job, part.samplers[:1])
    assert first < scores["training_seconds"] <= time.perf_counter() - start
    assert "spent_seconds" not in scores


# The signal of the limit may find a destructor, of which Python tells before it is sent again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_time_that_is_over_before_anything_is_finished_is_no_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.Laboratory, "_trained", lambda *given: {"squared_error": 1.0})
    monkeypatch.setattr(jobs.Laboratory, "_scored", over_within(monkeypatch))
    monkeypatch.setattr(jobs, "_write", lambda *given: None)
    start = time.monotonic()
    words = ["phase2", "--scale", "smoke", "--seed", "0", "--limit", "1000", "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, time.monotonic() - start < 60) == (0, True)
    assert "stopped in scoring meanflow 1, 16 samples; to begin it again, run the same command" in done.output


def test_rows_are_the_scores_of_the_runs(phase2):
    (path,) = (phase2 / "results").iterdir()
    part = json.loads(path.read_text())["parts"][0]
    rows = {(row["labels"]["training"], row["labels"]["sampler"]): row["metrics"] for row in part["rows"]}
    kept = [json.loads(file.read_text()) for file in sorted((phase2 / "smoke").glob("*-seed?/scores.json"))]
    assert len(kept) == 6
    for (training, sampler), metrics in rows.items():
        if sampler:
            values = list(metrics["energy distance"]["seeds"].values())
            assert metrics["energy distance"]["mean"] == pytest.approx(np.mean(values))
            found = {scores["samplers"][f"{sampler}, 16 samples"]["found"]["energy distance"] for scores in kept}
            assert set(values) <= found, training
    assert rows["ratio 0.25", "euler 16"]["NFE"]["mean"] == 16
    # The ten pictures are trained on and scored against.
    assert rows["floor: as many training images", ""]["energy distance"]["mean"] == 0


def test_what_a_training_held_is_let_go_of_before_its_scores_and_the_next(tmp_path, monkeypatch):
    trained, alive = [], []

    class Kept(Trainer):
        def run_to_end(self):
            trained.append(weakref.ref(self.state.model))
            return super().run_to_end()

    def score(*given):
        alive.append([one() is not None for one in trained])
        return load_generator(*given)

    monkeypatch.setattr(jobs, "Trainer", Kept)
    monkeypatch.setattr(jobs, "load_generator", score)
    gc.disable()  # by itself it would come at any time
    try:
        run("phase3", ExperimentRequest("smoke", ("multiclass",), (0,), runs=tmp_path), tmp_path)
    finally:
        gc.enable()
    assert alive == [[False], [False, False]]


@pytest.mark.thorough
def test_overrides_are_of_all_trainings_and_take_no_results_place(tmp_path):
    given = ["phase4", "--scale", "smoke", "--part", "ratio", "--seed", "0", "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, [*given, "data=multiclass", "epochs=2", "optimizer.lr=2e-3"])
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "results").glob("*.json")
    found = json.loads(path.read_text())
    assert found["conditions"]["overrides"] == ["data=multiclass", "epochs=2", "optimizer.lr=2e-3"]
    runs = sorted((tmp_path / "smoke").glob("multiclass-*-seed0"))
    assert len(runs) == 4  # of four shares
    for run_of in runs:
        config = json.loads((run_of / "config.json").read_text())
        assert (config["epochs"], config["optimizer"]["lr"]) == (2, 2e-3)
    assert results_folder(None, "gpu", tmp_path, ("epochs=2",)) == tmp_path / "results"
    done = CliRunner().invoke(app, [*given, "epochs"])
    assert done.exit_code == 2
    assert "epochs: expected key=value" in done.output
    done = CliRunner().invoke(app, [*given, "loss.meanflow_ratio=0.1"])
    assert done.exit_code == 2
    assert "loss.meanflow_ratio: set by the arms of --part ratio; omit it" in done.output


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["seed=7"], "seed: set for each training by --seed and --runs; omit it"),
        (
            ["run_name=a", "output_dir=b", "resume=false", "overwrite=true"],
            "run_name, output_dir, resume, overwrite: set for each",
        ),
        (["epochs=2", "epochs=3"], "epochs=3: epochs is given twice, expected once"),
    ],
)
@pytest.mark.parametrize("command", [["phase2"], ["time-to-quality", "--code", "fullstride", "--seed", "0"]])
def test_an_override_that_would_not_be_taken_is_refused(tmp_path, command, given, message):
    done = CliRunner().invoke(app, [*command, "--scale", "smoke", "--runs", str(tmp_path), *given])
    assert done.exit_code == 2
    assert message in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_part_alone(tmp_path):
    asked = ExperimentRequest("smoke", ("solvers",), (0,), runs=tmp_path)
    path = run("phase3", asked, tmp_path)
    found = json.loads(path.read_text())
    assert [len(part["rows"]) for part in found["parts"]] == [23, 0, 0]
    metrics = {row["labels"]["sampler"]: row["metrics"] for row in found["parts"][0]["rows"]}
    nfe = {sampler: values["NFE"]["mean"] for sampler, values in metrics.items() if sampler}
    assert nfe["heun 4"] == nfe["euler 8"] == nfe["meanflow 8"] == 8
    assert nfe["rk4 10"] == 40
    assert nfe["dopri5"] > 8
    assert set(found["curves"][0]["series"]) == {"meanflow", "euler", "heun", "rk4", "dopri5"}
    assert len(found["missing"]) == 4


def test_the_final_loss_is_that_of_the_last_tenth():
    lines = [{"step": step, "squared_error": 100.0 if step <= 90 else float(step)} for step in range(1, 101)]
    assert final(lines) == pytest.approx(np.mean(range(91, 101)))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (ExperimentRequest("huge"), "--scale=huge: expected one of"),
        (ExperimentRequest("smoke", ("solver",)), "--part=solver: expected .*overfit"),
        (ExperimentRequest("smoke", collect=True), "no scores of phase2"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(asked, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run("phase2", dataclasses.replace(asked, runs=tmp_path), tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_scale_of_a_gpu_needs_one(tmp_path):
    done = CliRunner().invoke(app, ["phase2", "--scale", "gpu", "--runs", str(tmp_path)])
    assert done.exit_code == 2
    assert "device=cuda" in done.output
    assert not list(tmp_path.iterdir())


def test_a_smoke_test_stays_out_of_the_results():
    runs = Path("some/runs")
    assert results_folder(None, "smoke", runs) == runs / "results"
    assert results_folder(None, "cpu", runs) == Path("benchmarks/results")
    assert results_folder(Path("given"), "smoke", runs) == Path("given")


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (["time-to-quality", "data.path=there"], True),
        (["time-to-quality", "optimizer.decay=cosine", "ema.decays=[0.99]"], True),
        (["time-to-quality", "ema.decays=[0.99]"], False),
        (["time-to-quality", "optimizer.decay=cosine", "model.channels=32"], False),
        (["bert", "data.path=there"], True),
        (["bert", "data.length=128"], False),
    ],
)
def test_other_settings_take_no_results_place(given, own, tmp_path, monkeypatch):
    places = []
    monkeypatch.setattr("benchmarks.harness.seeds.conclude", lambda gather, out, *_: places.append(out))
    done = CliRunner().invoke(app, [*given, "--collect", "--runs", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert places == [Path("benchmarks/results") if own else tmp_path / "results"]


def _part(arms: list[str], samplers: dict[str, float]) -> PartResult:
    """Return a part with distances 1, 2, ... over all rows, the mean of two seeds."""
    rows = [({"training": arm, "sampler": name}, nfe) for arm in arms for name, nfe in samplers.items()]
    outcomes = [
        Outcome(labels, {"NFE": {0: nfe, 1: nfe}, "energy distance": {0: i + 0.5, 1: i + 1.5}}, ["-"])
        for i, (labels, nfe) in enumerate(rows)
    ]
    return PartResult("part", "Title", "Why?", [*outcomes, Outcome({"training": "floor", "sampler": ""}, {})])


def test_runs_with_scores_by_some_samplers_are_gathered_and_the_others_are_named(phase2, tmp_path):
    shutil.copytree(phase2, tmp_path, dirs_exist_ok=True)
    asked = ExperimentRequest("smoke", seeds=(0, 1), collect=True, runs=tmp_path)
    whole = json.loads(run("phase2", asked, tmp_path / "results").read_text())["parts"][0]["rows"]
    job = TrainingJob.of(PHASE2.parts[0], PHASE2.parts[0].arms[0], "smoke", 1, asked.root)
    path = jobs.run_folder(job) / jobs.SCORES
    scores = json.loads(path.read_text())
    del scores["samplers"][next(name for name in scores["samplers"] if name.startswith("meanflow 1,"))]
    path.write_text(json.dumps(scores))
    found = json.loads(run("phase2", asked, tmp_path / "results").read_text())
    assert found["missing"] == ["overfit, flow matching, MSE, seed 1: the score of meanflow 1"]
    first, *others = found["parts"][0]["rows"]
    assert others == whole[1:]
    seeds = {name: list(metric["seeds"]) for name, metric in first["metrics"].items()}
    assert seeds == {name: ["0"] for name in whole[0]["metrics"]}
    assert phase.count_missing("phase2", asked) == 1


def test_a_line_is_a_kind_of_sampler_of_one_training_or_one_training_of_several():
    samplers = {"meanflow 1": 1.0, "meanflow 2": 2.0, "meanflow 4": 4.0, "meanflow 8": 8.0, "euler 1": 1.0}
    one = by_evaluations(_part(["a"], samplers))
    assert one is not None
    assert one.series == {"meanflow": [(1, 1), (2, 2), (4, 3), (8, 4)], "euler": [(1, 5)]}
    few = {name: samplers[name] for name in ("meanflow 1", "meanflow 2", "meanflow 4")}
    several = by_evaluations(_part(["a", "b"], few))
    assert several is not None
    assert several.series == {"a": [(1, 1), (2, 2), (4, 3)], "b": [(1, 4), (2, 5), (4, 6)]}
    assert several.caption.endswith("; meanflow 1, meanflow 2, meanflow 4.")
    assert by_evaluations(_part(["a"], few)) is None


@pytest.mark.parametrize("wrong", ["evaluation.backend=graph", "evaluation.precision=tf32"])
def test_what_cannot_generate_is_told_before_anything_is_trained(tmp_path, wrong):
    asked = ExperimentRequest("smoke", seeds=(0,), runs=tmp_path, overrides=(wrong,))
    with pytest.raises(ConfigError, match=rf"{wrong}: .* CUDA's, the device is cpu"):
        run("phase2", asked, tmp_path / "results")
    assert not list(tmp_path.glob("smoke/*"))
