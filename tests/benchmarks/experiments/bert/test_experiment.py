import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from benchmarks.cli.app import app
from benchmarks.experiments import gpu_pool
from benchmarks.experiments.bert import experiment
from benchmarks.experiments.bert import steps as experiment_steps
from benchmarks.experiments.bert.experiment import BertRequest, recipe_of
from benchmarks.experiments.bert.result import gather
from benchmarks.harness.time_limit import Limit
from fullstride.bert.training.settings import settings_of
from fullstride.errors import ConfigError, Preempted
from fullstride.measure.roofline import Ceilings
from tests.helpers.time_over import over_within

pytestmark = pytest.mark.usefixtures("compiled_soon")


@pytest.fixture(autouse=True)
def _small(monkeypatch, tiny_is_small):
    monkeypatch.setattr(experiment_steps, "ROUNDS", 1)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes where its learning rate is a schedule
        yield


@pytest.fixture(scope="module")
def given(texts) -> tuple[str, ...]:
    return "data=text_files", f"data.path={texts}", "data.separator=line", "data.vocab_size=90"


@pytest.mark.thorough
def test_the_steps_that_fit_are_timed_trained_cut_and_gathered(given, tmp_path: Path):
    asked = BertRequest("smoke", ("tiny",), 1e-3, 0, tmp_path, given)
    with pytest.raises(Preempted, match="stopped; saved step 1"):
        experiment.run("tiny", asked, Limit.of(0.0))
    assert [path.name for path in (tmp_path / "smoke").iterdir()] == ["tiny-0"]
    timed = json.loads((tmp_path / "smoke" / "tiny-0" / "overhead.json").read_text())
    assert set(timed["ways"]) == {"bare executable", "TrainStep grouped", "filter_jit", "filter_jit donated"}
    assert timed["ceilings"]["gemm"] == "64^3 float32"
    for way in timed["ways"].values():
        assert way["over the floor"] == pytest.approx(way["step ms"] / timed["floor"]["ms"])
    assert timed["ways"]["bare executable"]["over the bare executable"] == 1
    fit = 60e3 * 1e-3 * 0.95 / timed["ways"]["TrainStep grouped"]["step ms"]
    assert timed["steps"] == max(int(fit), 3)
    assert gather(asked).missing == [f"tiny: 1 of {timed['steps']} steps"]
    with pytest.raises(ConfigError, match=r"--minutes 0\.01: .* was begun with 0\.001"):
        experiment.run("tiny", BertRequest("smoke", ("tiny",), 1e-2, 0, tmp_path, given))
    given = ["--scale", "smoke", "--model", "tiny", "--minutes", "1e-3", "--runs", str(tmp_path), *given]
    done = CliRunner().invoke(app, ["bert", *given])
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "results").glob("experiment-bert--smoke--*.json")
    found = json.loads(path.read_text())
    assert found["missing"] == []
    assert found["ceilings"] == {"tiny": timed["ceilings"]}
    assert f"ceilings, tiny: {Ceilings(**timed['ceilings'])}" in done.output
    kept = tmp_path / "smoke" / "tiny-0" / "overhead.json"
    before = kept.read_bytes(), (kept.parent / "metrics.jsonl").read_bytes()
    assert len(json.loads(before[0])["environments"]) == 1
    shutil.rmtree(kept.parent / "checkpoints")  # as where the two files alone were kept
    experiment.run("tiny", asked)
    # What nothing was added to is as old as it was, and what was learned is not forgotten.
    assert (kept.read_bytes(), (kept.parent / "metrics.jsonl").read_bytes()) == before
    learned = found["parts"][0]["rows"][0]["metrics"]
    assert learned["steps"]["mean"] == timed["steps"]
    assert 0 < learned["bits/byte"]["mean"] < 8
    assert [row["labels"]["way"] for row in found["parts"][1]["rows"]] == list(timed["ways"])
    minutes = [x for x, _ in found["curves"][0]["series"]["tiny"]]
    assert minutes == sorted(minutes)
    assert len(minutes) == timed["steps"]
    evaluated = [x for x, _ in found["curves"][1]["series"]["tiny"]]
    every = -(-timed["steps"] // experiment.EVALUATIONS)
    assert len(evaluated) == -(-timed["steps"] // every)
    assert 0 < evaluated[0] <= evaluated[-1] == minutes[-1]


def test_other_texts_of_ones_own_are_another_experiment(texts, tmp_path):
    settings = [
        BertRequest("smoke", ("tiny",), 1.0, 0, tmp_path, (*given, f"data.path={path}")).settings("tiny", 9)
        for given in (("data=text_files",), ("data=gcide",))
        for path in ("a.txt", "b.txt")
    ]
    own, other, here, there = map(recipe_of, settings)
    assert own != other
    assert here == there  # the same texts, wherever they lie


def test_a_run_is_gone_on_with_and_gathered_by_its_own_settings_alone(tmp_path):
    asked = BertRequest("smoke", ("tiny", "mini"), 1.0, 0, tmp_path, ("optimizer.lr=1e-3",))
    for model, minutes in (("tiny", 1.0), ("mini", 2.0)):
        (run := asked.run(model)).mkdir(parents=True)
        recipe = recipe_of(asked.settings(model, 100))
        begun = {"steps": 100, "minutes": minutes, "ways": {}, "recipe": recipe}
        (run / "overhead.json").write_text(json.dumps(begun))
        line = {"step": 100, "loss": 3.0, "seconds_per_step": 6.0, "tokens_per_second": 1.0, "host_ms": 1.0}
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    alone = replace(asked, models=("tiny",))
    assert gather(replace(alone, overrides=(*asked.overrides, "log_every=3", "data.path=there"))).missing == []
    for overrides in ((), (*asked.overrides, "data.length=40")):
        other, named = replace(alone, overrides=overrides), "data.length=24" if overrides else "optimizer.lr=0.001"
        for act in (gather, lambda each: experiment.run("tiny", each)):
            with pytest.raises(
                ConfigError, match=f"tiny-0: was begun with {named}; give the same settings or another --runs"
            ):
                act(other)
    with pytest.raises(ConfigError, match=r"--minutes of the runs differ \(tiny: 1, mini: 2\)"):
        gather(asked)


def test_times_that_were_copied_in_part_are_named(tmp_path):
    asked = BertRequest("smoke", ("tiny",), 1e-3, 0, tmp_path)
    asked.run("tiny").mkdir(parents=True)
    (asked.run("tiny") / "overhead.json").write_text('{"minutes": 0.001, "st')
    with pytest.raises(
        ConfigError, match=r"tiny-0/overhead\.json: incomplete or damaged \(.*\); copy it again, or delete it"
    ):
        experiment.run("tiny", asked)


def test_an_evaluation_between_two_lines_of_the_log_has_its_place_on_the_curve(tmp_path):
    run = BertRequest("smoke", runs=tmp_path).run("tiny")
    run.mkdir(parents=True)
    (run / "overhead.json").write_text(json.dumps({"steps": 100, "minutes": 1.0, "ways": {}}))
    paces = {"loss": 3.0, "seconds_per_step": 6.0, "tokens_per_second": 1.0, "host_ms": 1.0}
    scores = {"masked_loss": 2.5, "masked_accuracy": 0.5, "bits_per_byte": 1.5}
    lines = [
        {"step": 50} | paces,
        {"step": 75, "evaluation": scores},
        {"step": 100} | paces | {"seconds_per_step": 12.0},
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = gather(BertRequest("smoke", runs=tmp_path))
    assert "ceilings" not in found.to_dict()  # nor do results of before they were measured have any
    _, bits = found.curves
    assert bits.series == {"tiny": [(pytest.approx(5 + 5), 1.5)]}


def test_a_run_lies_where_its_result_is_looked_for_and_overrides_win_over_the_scale(tmp_path):
    asked = BertRequest(
        "smoke", ("tiny",), 1.0, 3, tmp_path, ("data.name=text_files", "data.length=40", "eval_every=2")
    )
    settings = asked.settings("tiny", 40)
    assert Path(settings.output_dir) / settings.run_name == asked.run("tiny") == tmp_path / "smoke" / "tiny-3"
    assert (settings.seed, settings.eval_every) == (3, 2)
    assert (settings.data.name, settings.data.length) == ("text_files", 40)


@pytest.mark.parametrize(
    ("given", "message"),
    {
        "run_name=other": "run_name: set by --model, --seed, --minutes and --runs; use these",
        "output_dir=/elsewhere": "output_dir: set by --model",
        "seed=7": "seed: set by --model",
        "model=mini": "model.size: set by --model",
        "steps=9": "steps: set by --model",
        "resume=false": "resume: set by --model",
        "stepps": "stepps: expected key=value",
        "data.lenght=3": "data.lenght=3: no such key; did you mean data.length",
    }.items(),
)
def test_an_override_that_would_not_be_taken_is_refused(tmp_path, given, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        BertRequest("smoke", runs=tmp_path, overrides=(given,))
    with pytest.raises(ConfigError, match="data.length=4: data.length is given twice"):
        BertRequest("smoke", runs=tmp_path, overrides=("data.length=3", "data.length=4"))


def test_each_model_is_a_process_on_a_gpu(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("benchmarks.experiments.visible_gpus.count_gpus", lambda visible=None: 2)
    monkeypatch.setattr(gpu_pool, "run_side_by_side", lambda *given: started.append(given) or [])
    given = ["--gpus", "0,1", "--minutes", "3", "--limit", "70", "--runs", str(tmp_path), "data=python_docs"]
    done = CliRunner().invoke(app, ["bert", *given])
    assert "no run of base6, base" in done.output  # nothing was run in this test
    assert "no GPU" not in done.output
    ((tasks, gpus, logs, limit),) = started
    assert (gpus, logs, limit.seconds) == (["0", "1"], tmp_path / "logs", 70)
    rest = ["--minutes", "3.0", "--seed", "0", "--scale", "gpu", "--runs", str(tmp_path)]
    out = ["--out", str(tmp_path / "logs" / "results")]
    words = [["benchmarks", "bert", "data=python_docs", "--model", one, *rest, *out] for one in ("base6", "base")]
    assert [task.words for task in tasks] == words


@pytest.mark.parametrize(("scale", "minutes"), [("smoke", 0.05), ("cpu", 20.0), ("gpu", 20.0)])
def test_a_smoke_test_trains_for_seconds(scale, minutes, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(experiment, "run", lambda model, given, limit: asked.append(given))
    CliRunner().invoke(app, ["bert", "--scale", scale, "--model", "tiny", "--runs", str(tmp_path)])
    assert [given.minutes for given in asked] == [minutes]


def test_a_step_that_is_timed_when_the_time_is_over_is_timed_again(given, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "overhead", over_within(monkeypatch))
    given = ["--scale", "smoke", "--minutes", "1e-3", "--limit", "1000", "--runs", str(tmp_path), *given]
    start = time.monotonic()
    done = CliRunner().invoke(app, ["bert", *given])
    assert (done.exit_code, time.monotonic() - start < 60) == (0, True)
    assert "stopped in timing tiny's step; to begin it again, run the same command" in done.output, done.output
    assert not list(tmp_path.rglob("overhead.json"))


def test_what_cannot_be_is_refused(tmp_path):
    # One that has logged nothing yet counts as none.
    (begun := tmp_path / "gpu" / "base6-0").mkdir(parents=True)
    (begun / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="no run of base6, base"):
        gather(BertRequest("gpu", runs=tmp_path))
    with pytest.raises(ConfigError, match="--scale=gpus: expected one of gpu, "):
        BertRequest("gpus", runs=tmp_path)


def test_steps_that_could_not_be_compared_are_not_compiled(given, tmp_path):
    asked = BertRequest("smoke", ("tiny",), 1e-3, 0, tmp_path, (*given, "precision=fp16"))
    with pytest.raises(ConfigError, match="precision=fp16: expected one of bf16, fp32"):
        experiment.run("tiny", asked)


def test_on_a_cpu_it_is_the_training_that_needs_no_settings(tmp_path):
    asked = BertRequest("cpu", runs=tmp_path)
    assert asked.models == ("tiny", "mini")
    found, usual = asked.settings("tiny", 1200), settings_of([])
    for part in ("data", "model", "optimizer", "evaluation", "precision"):
        same = getattr(usual, part)
        if part == "evaluation":
            assert found.evaluation.size == same.size
        else:
            assert getattr(found, part) == same
