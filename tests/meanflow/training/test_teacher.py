"""Runs that learn from another run."""

import dataclasses
import json
import shutil
from typing import Any

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import MANIFEST, _seal, checkpoints, read_manifest
from fullstride.meanflow.config.losses import AlphaFlowConfig, TeacherPathConfig
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.config.presets import config_from_dict
from fullstride.meanflow.config.schema import DataConfig, GuardConfig, LossConfig
from fullstride.meanflow.sampling.generate import load_generator
from fullstride.meanflow.training.preflight import preflight
from fullstride.meanflow.training.teacher import RECORD, load_teacher
from fullstride.meanflow.training.trainer import Trainer, train
from fullstride.runs.folder import read_metrics, run_config
from tests.meanflow.training.test_trainer import config

ZERO: dict[str, Any] = {"meanflow_ratio": 0.0, "weighting_power": 0.0}
MSE = LossConfig("mse", **ZERO)


def small(folder, **kwargs):
    return config(folder, **{"data": DataConfig(batch_size=149), "gradient_accumulation_steps": 1} | kwargs)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """The folder of a flow that has been trained for a moment."""
    return train(small(tmp_path_factory.mktemp("teacher"), epochs=1, loss=MSE, run_name="flow"))


def learner(folder, taught, **kwargs):
    loss = LossConfig(meanflow_ratio=0.5, tangent="teacher", teacher=str(taught), **kwargs)
    return small(folder, loss=loss, epochs=2)


def test_a_run_learns_from_another_and_goes_on_with_the_same_weights(taught, tmp_path):
    given = learner(tmp_path, taught)
    run = train(given)
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in read_metrics(run) if "loss" in line)
    assert json.loads((run / RECORD).read_text())["step"] == 6
    again = dataclasses.replace(given, epochs=3, resume=True)
    other = dataclasses.replace(again.loss, teacher=str(checkpoints(taught)[-1]))
    train(dataclasses.replace(again, loss=other))  # the same weights by another path
    (run / RECORD).write_text(json.dumps({"step": 3, "ema": 0.9, "sha256": "another"}))
    with pytest.raises(ConfigError, match="began with those of step 3, average 0.9; name that checkpoint"):
        Trainer(again)


def test_the_teacher_is_the_chosen_average_frozen(taught, tmp_path):
    teacher = load_teacher(learner(tmp_path, taught, teacher_ema=0.5), "cpu")
    assert teacher is not None
    assert isinstance(teacher.network, torch.nn.Module)
    expected = load_generator(taught, "cpu", 0.5).model.state_dict()
    assert all(torch.equal(p, expected[name]) for name, p in teacher.network.state_dict().items())
    assert not any(p.requires_grad for p in teacher.network.parameters())
    assert teacher.num_classes == 10


def edited(taught, folder, **changes):
    """A copy of a teacher whose manifest says something else about its training."""
    checkpoint = checkpoints(taught)[-1]
    copy = folder / "edited"
    shutil.copytree(checkpoint, copy)
    manifest = read_manifest(copy)
    for key, value in changes.items():
        group, _, leaf = key.partition("__")
        manifest[group][leaf] = value
    save_manifest(copy, manifest)
    return copy


def save_manifest(folder, manifest):
    (folder / MANIFEST).write_text(json.dumps(manifest | {"seal": _seal(manifest)}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data__image_shape": [1, 16, 16]}, r"samples of \(1, 16, 16\), expected \(1, 8, 8\)"),
        ({"data__num_classes": 7}, "number of classes that the network takes 7, expected 10"),
        ({"data__pixels": False}, "pictures, not latents: False, expected True"),
    ],
)
def test_a_teacher_of_other_samples_is_refused_before_anything_begins(changes, reason, taught, tmp_path):
    given = learner(tmp_path, edited(taught, tmp_path, **changes))
    with pytest.raises(ConfigError, match=reason):
        preflight(given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        ({"teacher": "nowhere"}, "no such folder"),
        ({"teacher_ema": 0.7}, "expected one of 0.9, 0.5, the teacher's averages"),
        ({"teacher_guidance": 2.0}, "never saw 'no class'"),
        ({"teacher": ""}, "loss.teacher=RUN"),
        ({"tangent": "data"}, "loss.tangent=teacher with a teacher"),
        ({"label_dropout": 0.1}, "the teacher's own guidance"),
    ],
)
def test_settings_that_a_teacher_cannot_have_are_refused(loss, reason, taught, tmp_path):
    given = learner(tmp_path, taught)
    with pytest.raises(ConfigError, match=reason):
        preflight(dataclasses.replace(given, loss=dataclasses.replace(given.loss, **loss)))


def test_a_teacher_is_no_network_without_velocity_and_not_the_run_itself(taught, tmp_path):
    for changes in ({"meanflow_ratio": 1.0}, {"name": "meanflow", "meanflow_ratio": 1.0}):
        shutil.rmtree(tmp_path / "edited", ignore_errors=True)
        saved = {**read_manifest(checkpoints(taught)[-1])["config"]["loss"], **changes}
        given = learner(tmp_path, edited(taught, tmp_path, config__loss=saved))
        with pytest.raises(ConfigError, match="never sees r = t"):
            preflight(given)
    own = dataclasses.replace(learner(taught.parent, taught), run_name=taught.name)
    with pytest.raises(ConfigError, match="this very run"):
        preflight(own)


def test_a_run_on_the_paths_of_a_teacher_is_no_teacher_itself(taught, tmp_path):
    run = train(small(tmp_path, loss=TeacherPathConfig("cmt", **ZERO, teacher=str(taught), path_steps=2), epochs=1))
    assert [line["squared_error"] > 0 for line in read_metrics(run) if "loss" in line] == [True] * 6
    with pytest.raises(ConfigError, match="trained with loss=cmt .* never sees r = t"):
        preflight(learner(tmp_path / "other", run))


def test_a_run_differentiates_its_derivative_with_every_check_of_the_first_step(tmp_path):
    guard, model = GuardConfig(), dataclasses.replace(config(tmp_path).model, dropout=0.0)
    given = small(tmp_path, loss=LossConfig("tvm", meanflow_ratio=0.5, weighting_power=0.0), epochs=1, guard=guard)
    run = train(dataclasses.replace(given, model=model, data=DataConfig(batch_size=449)))
    assert any("tangents" in line for line in read_metrics(run))


def test_alpha_flow_changes_its_form_within_a_run_and_resumes_in_the_one_it_was_in(tmp_path):
    loss = AlphaFlowConfig("alphaflow", meanflow_ratio=0.5, flow_until=0.3, exact_from=0.7, least_alpha=0.05)
    given = small(tmp_path, loss=loss, epochs=2, model=dataclasses.replace(config(tmp_path).model, dropout=0.0))
    trainer, seen = Trainer(given), []
    trainer.after_step.append(lambda: seen.append(vars(trainer.objective.meanflow)["form"]))
    run = trainer.run_to_end()
    # 12 steps: shares 0 to 3/12 are below 0.3, 4/12 to 8/12 below 0.7.
    assert seen == ["flow"] * 4 + ["discrete"] * 5 + ["exact"] * 3
    assert {line["step"] for line in read_metrics(run) if "loss" in line} == set(range(1, 13))
    again = Trainer(dataclasses.replace(given, epochs=3, resume=True))
    assert vars(again.objective.meanflow)["form"] == "discrete"  # 12 of 18 steps
    again.run_to_end()
    assert config_from_dict(run_config(run)).loss == loss


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["loss=alphaflow", "loss.flow_until=0.7"], "a flow_until below exact_from"),
        (["loss=alphaflow", "precision=bf16"], "at least 0.05 with bf16"),
        (["loss=alphaflow", "backend=compile", "model.dropout=0.1"], "would drop different units"),
        (["loss=alphaflow", "loss.tangent_warmup=0.1"], "its schedule"),
        (["loss=mse", "loss.tangent_limit=1"], "nothing is differentiated"),
        (["loss=imf", "loss.tangent=teacher", "loss.teacher=x"], "along whose velocity z moves"),
        (["loss.exact_from=0.5"], "one of another loss"),
    ],
)
def test_what_excludes_the_schedules(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        compose(overrides)
