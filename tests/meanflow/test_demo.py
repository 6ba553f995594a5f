import dataclasses
import json
import random
import re
import signal

import pytest
import torch
from PIL import Image

from fullstride.errors import ConfigError, Preempted
from fullstride.meanflow import demo
from fullstride.meanflow.checkpoints.folder import checkpoints, find_checkpoint
from fullstride.meanflow.config.overrides import validate
from fullstride.meanflow.config.schema import DataConfig, EvalConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.evaluation.evaluator import Evaluator
from fullstride.meanflow.sampling.generate import load_generator
from fullstride.meanflow.training.trainer import Trainer, train
from tests.meanflow.training.test_trainer import assert_identical, config, learned

RECIPE = demo.demo_config
# Either signal stops a training in test_trainer.py.
STOPS = pytest.mark.parametrize(
    ("number", "error"),
    [
        pytest.param(signal.SIGTERM, Preempted, marks=pytest.mark.thorough, id="term"),
        pytest.param(signal.SIGINT, KeyboardInterrupt, id="int"),
    ],
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The demo of a network of a few thousand weights, with two samplers."""

    def recipe(out, epochs, seed):
        settings = config(out.parent, epochs=epochs, run_name=out.name, seed=seed)
        return dataclasses.replace(settings, overwrite=True, evaluation=EvalConfig(num_samples=30))

    monkeypatch.setattr(demo, "SAMPLERS", [("meanflow", 1), ("euler", 2)])
    monkeypatch.setattr(demo, "demo_config", recipe)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Training without a break."""
    return train(config(tmp_path_factory.mktemp("straight"), epochs=2, seed=5))


def test_it_leaves_everything_that_it_promises_and_says_where(tmp_path, capsys):
    out = tmp_path / "demo"
    demo.run_demo(out, epochs=1)
    said, told = capsys.readouterr()
    metrics = json.loads((out / "metrics.json").read_text())
    assert set(metrics["samplers"]) == {"meanflow 1", "euler 2"}
    assert metrics["one_step_over_best_solver"] > 0
    assert metrics["training_seconds"] > 0
    for name in ("samples.png", "loss.png"):
        with Image.open(out / name) as picture:
            assert picture.width > 500
    generator = load_generator(out, "cpu")
    assert generator.image_shape == (1, 8, 8)
    count = sum(p.numel() for p in generator.model.parameters())
    first, second, *_ = said.splitlines()
    assert first == (
        f"training unet ({count:,} parameters) on 898 images (1x8x8) of data=digits: 1 epoch, 2 steps of 302, on cpu"
    )
    assert second.startswith("expected: about half a minute of training and half a minute of scoring 2 samplers, on ")
    scored = [line for line in told.splitlines() if not line.startswith("training: ")]  # shown where it takes long
    assert [re.sub(r"[\d.]+ s$", "T", line) for line in scored] == [
        "1 of 2, meanflow 1: 30 samples of 1 evaluation each, T",
        "2 of 2, euler 2: 30 samples of 2 evaluations each, T",
    ]
    assert "one-step energy distance / best solver's" in said
    assert all(f"  {path} " in said for path in (out / "samples.png", out / "metrics.json", find_checkpoint(out)))
    assert f"fullstride meanflow sample {out} " in said
    assert "replaced" not in said


def test_both_halves_of_the_picture_have_the_same_class_in_the_same_place(tmp_path, monkeypatch):
    drawn, labels = {}, []
    compare, sample = demo.save_comparison, demo.sample

    def compared(generated, real, path, **words):
        drawn.update(words, generated=generated, real=real)
        compare(generated, real, path, **words)

    def sampled(model, *, label, **given):
        labels.extend(label.tolist())
        return sample(model, label=label, **given)

    monkeypatch.setattr(demo, "save_comparison", compared)
    monkeypatch.setattr(demo, "sample", sampled)
    demo.run_demo(tmp_path / "demo", epochs=1)
    data = load_data(DataConfig())
    held_out = data.images(data.test, torch.arange(len(data.test)))
    shown = [{int(c) for c in data.test.labels[(held_out == real).flatten(1).all(1)]} for real in drawn["real"]]
    assert shown == [{label} for label in labels]
    assert labels == [c for c in range(10) for _ in range(10)]
    assert drawn["row_captions"] == [str(c) for c in range(10)]
    assert len(drawn["generated"]) == len(labels)
    assert len({tuple(real.flatten().tolist()) for real in drawn["real"]}) == len(labels), "a digit is shown twice"


@STOPS
def test_a_demo_that_was_stopped_in_training_is_continued_by_the_same_command(
    straight, tmp_path, monkeypatch, capsys, number, error
):
    out, step = tmp_path / "demo", Trainer._step

    def interrupted(trainer, *batch):
        metrics = step(trainer, *batch)
        if trainer.state.position.step == 2:
            signal.raise_signal(number)
        return metrics

    monkeypatch.setattr(Trainer, "_step", interrupted)
    with pytest.raises(error, match=r"saved .*3; to continue, run the same command$"):
        demo.run_demo(out, epochs=2, seed=5)
    monkeypatch.setattr(Trainer, "_step", step)
    assert [path.name for path in checkpoints(out)] == ["step_00000002", "step_00000003"]
    capsys.readouterr()
    demo.run_demo(out, epochs=2, seed=5)
    assert f"{out} holds an unfinished demo with the same settings; continuing it" in capsys.readouterr().out
    assert_identical(straight, out)
    assert learned(straight) == learned(out)


@STOPS
def test_a_demo_that_was_stopped_in_scoring_is_not_trained_again(tmp_path, monkeypatch, capsys, number, error):
    out, score = tmp_path / "demo", Evaluator.sampler_score

    def interrupted(evaluator, model, sampler, *given):
        if sampler == "euler":
            signal.raise_signal(number)
        return score(evaluator, model, sampler, *given)

    monkeypatch.setattr(Evaluator, "sampler_score", interrupted)
    with pytest.raises(error, match="stopped in scoring .* run the same command"):
        demo.run_demo(out, epochs=1)
    monkeypatch.setattr(Evaluator, "sampler_score", score)
    trained = (out / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    monkeypatch.setattr(Trainer, "_step", lambda *_: pytest.fail("it was trained again"))
    demo.run_demo(out, epochs=1)
    assert (out / "metrics.jsonl").read_bytes() == trained
    assert "expected: about half a minute of scoring 2 samplers" in capsys.readouterr().out
    assert json.loads((out / "metrics.json").read_text())["training_seconds"] > 0


def test_what_is_replaced_is_said_first(tmp_path, monkeypatch, capsys):
    out = tmp_path / "demo"
    demo.run_demo(out, epochs=1)
    capsys.readouterr()
    monkeypatch.setattr(Evaluator, "sampler_score", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        demo.run_demo(out, epochs=2)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{out} holds a finished demo (epochs=1, seed=0, step_00000002); replacing it"
    with pytest.raises(ZeroDivisionError):
        demo.run_demo(out, epochs=2, seed=3)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{out} holds an unfinished demo (epochs=2, seed=0, step_00000004); replacing it"


def test_a_run_that_is_no_demo_is_never_replaced(tmp_path):
    run = train(dataclasses.replace(config(tmp_path, run_name="demo", epochs=1), precision="bf16"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"demo holds a run that is not a demo \(.*precision: bf16 -> fp32"):
        demo.run_demo(run, epochs=1)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    with pytest.raises(ConfigError, match="holds no run"):
        demo.run_demo(tmp_path / "other", epochs=1)


@pytest.mark.parametrize("seed", [0, 1])
def test_training_takes_the_seconds_of_all_its_steps(seed):
    draw = random.Random(seed)
    step, seconds, lines = 0, 0.0, [{"step": 0, "tangents": {}}]
    for _ in range(9):
        steps, each = draw.randint(1, 7), draw.random()
        step, seconds = step + steps, seconds + steps * each
        lines += [{"step": step, "seconds_per_step": each}, {"step": step, "evaluation": {}}]
    assert demo.training_seconds(lines) == pytest.approx(seconds)
    assert demo.training_seconds([]) == 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "half a minute"), (31.0, "half a minute"), (62.0, "a minute"), (95.0, "1.5 minutes"), (176.0, "3 minutes")],
)
def test_a_time_is_told_to_half_a_minute(seconds, words):
    assert demo.minutes(seconds) == words


def test_the_recipe_is_a_valid_configuration(tmp_path):
    recipe = RECIPE(tmp_path / "demo", 3, 0)
    validate(recipe)
    assert recipe.loss.meanflow_ratio > 0
