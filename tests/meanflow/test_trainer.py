import dataclasses
import json
import signal
from pathlib import Path

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow import trainer as trainer_module
from fullstride.meanflow.checkpoint import checkpoints, find_checkpoint, read_group
from fullstride.meanflow.config import (
    DataConfig,
    EmaConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from fullstride.meanflow.presets import LOSS_PRESETS
from fullstride.meanflow.runlog import read_metrics
from fullstride.meanflow.trainer import Trainer, learning_rate, train


def config(folder: Path, **kwargs) -> TrainConfig:
    """Two optimizer steps an epoch of a network of a few thousand weights, with everything random switched on."""
    base = TrainConfig(
        data=DataConfig(batch_size=149),
        model=ModelConfig("unet", 4, [1, 2], 1, [], dropout=0.2, class_conditional=True),
        loss=LossConfig(meanflow_ratio=0.25),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2, decay="cosine", grad_clip=1.0),
        ema=EmaConfig(decay=0.9),
        epochs=3,
        gradient_accumulation_steps=3,
        device="cpu",
        save_every=1,
        log_every=1,
        run_name="run",
        output_dir=str(folder),
    )
    return dataclasses.replace(base, **kwargs)


def groups(path: Path) -> dict[str, torch.Tensor]:
    names = ("model", "ema", "optimizer", "rng")
    return {f"{n}/{k}": v for n in names for k, v in read_group(path, n).items()}


def assert_identical(a: Path, b: Path) -> None:
    one, two = groups(find_checkpoint(a)), groups(find_checkpoint(b))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)


def learned(run: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in read_metrics(run)]


def test_a_run_learns_and_writes_what_it_did(tmp_path):
    run = train(config(tmp_path, epochs=6))
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["images"] == 12 * 447
    assert sum(x["squared_error_fm"] for x in lines[-3:]) < 0.97 * sum(x["squared_error_fm"] for x in lines[:3])
    assert [p.name for p in checkpoints(run)] == [f"step_{2 * e:08d}" for e in range(1, 7)]
    assert json.loads((run / "config.json").read_text())["epochs"] == 6
    moved = groups(find_checkpoint(run))
    assert all(moved[k].isfinite().all() for k in moved)


def test_resume_is_bit_identical_to_a_run_without_a_break(tmp_path):
    # A constant schedule for both: a cosine knows how long its run is.
    constant = OptimizerConfig(lr=1e-3, grad_clip=1.0)
    straight = train(config(tmp_path / "a", optimizer=constant))
    train(config(tmp_path / "b", optimizer=constant, epochs=1))
    resumed = train(config(tmp_path / "b", optimizer=constant, resume=True))
    assert_identical(straight, resumed)
    assert learned(straight) == learned(resumed)


def test_a_stop_signal_saves_in_mid_epoch_and_resume_goes_on_exactly(tmp_path, monkeypatch):
    straight = train(config(tmp_path / "a"))
    stopped = Trainer(config(tmp_path / "b"))
    step = stopped._step

    def interrupted(indices):
        metrics = step(indices)
        if stopped.state.position.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return metrics

    monkeypatch.setattr(stopped, "_step", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="stopped; saved .*step_00000003, go on with resume=true"):
        stopped.run_to_end()
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = train(config(tmp_path / "b", resume=True))
    assert_identical(straight, resumed)
    assert learned(straight) == learned(resumed)


def test_lines_after_the_checkpoint_and_half_lines_are_forgotten(tmp_path):
    run = train(config(tmp_path, epochs=2))
    whole = learned(run)
    for path in checkpoints(run)[1:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    resumed = train(config(tmp_path, epochs=2, resume=True))
    assert learned(resumed) == whole


def test_the_seed_decides_everything(tmp_path):
    a, b, c = (train(config(tmp_path / n, epochs=1, seed=s)) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    assert_identical(a, b)
    assert learned(a) != learned(c)


def test_accumulation_averages_the_gradients_of_its_parts(tmp_path):
    """With plain SGD's view: the gradient left behind by a step is the mean of the micro-batches' gradients."""
    trainer = Trainer(config(tmp_path, optimizer=OptimizerConfig(), loss=LossConfig(**LOSS_PRESETS["mse"])))
    model, generator = trainer.state.model.eval(), trainer.state.generator
    before = generator.get_state()
    (indices, *_) = trainer._batches(0)
    assert indices.shape == (3, 149)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for chosen in indices:
        loss, _ = trainer.loss(model, trainer.images[chosen], trainer.labels[chosen], generator=generator)
        for total, g in zip(expected, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            total += g / 3
    generator.set_state(before)
    trainer._step(indices)
    for p, e in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, e, rtol=1e-4, atol=1e-6)


def test_an_epoch_takes_every_image_at_most_once(tmp_path):
    trainer = Trainer(config(tmp_path))
    first, second = (torch.cat([b.flatten() for b in trainer._batches(e)]) for e in (0, 1))
    assert len(first) == len(first.unique()) == 894
    assert not torch.equal(first, second)


def test_bf16_trains_with_fp32_weights(tmp_path):
    run = train(config(tmp_path, precision="bf16", epochs=1))
    assert all(v.dtype == torch.float32 for k, v in groups(find_checkpoint(run)).items() if "rng" not in k)
    assert all(x["loss"] > 0 for x in read_metrics(run))


def test_evaluation_is_logged_beside_its_floor(tmp_path, monkeypatch):
    class Fake:
        def __init__(self, *args):
            pass

        def meanflow_scores(self, model, num_classes):
            assert num_classes == 10
            return {"meanflow 1": {"energy_distance": 1.5}, "floor": {"energy_distance": 0.5}}

    monkeypatch.setattr(trainer_module, "Evaluator", Fake)
    lines = read_metrics(train(config(tmp_path, eval_every=2, epochs=3)))
    assert [line["step"] for line in lines if "evaluation" in line] == [4, 6]


def test_learning_rate_warms_up_then_follows_the_cosine():
    cosine = OptimizerConfig(lr=2.0, warmup_steps=4, decay="cosine")
    assert learning_rate(cosine, 0, 100) == pytest.approx(0.5)
    assert learning_rate(cosine, 50, 100) == pytest.approx(1.0)
    assert learning_rate(cosine, 100, 100) == pytest.approx(0.0)
    assert learning_rate(OptimizerConfig(lr=2.0), 70, 100) == 2.0


def test_an_earlier_run_is_never_lost_unasked(tmp_path):
    run = train(config(tmp_path, epochs=1))
    with pytest.raises(ConfigError, match=r"already holds a run; go on with it \(resume=true\)"):
        train(config(tmp_path))
    assert len(checkpoints(run)) == 1
    train(config(tmp_path, epochs=1, seed=5, overwrite=True))
    assert json.loads((run / "config.json").read_text())["seed"] == 5


def test_overwrite_deletes_only_what_is_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        train(config(tmp_path, overwrite=True))
    assert (tmp_path / "run" / "thesis.tex").exists()


def test_impossible_settings_cost_no_earlier_run(tmp_path):
    run = train(config(tmp_path, epochs=1))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    five_levels = ModelConfig("unet", 4, [1, 1, 1, 1, 1])
    with pytest.raises(ConfigError, match="expected a multiple of 16"):
        train(config(tmp_path, overwrite=True, model=five_levels))
    with pytest.raises(ConfigError, match="cannot resume with other settings"):
        train(config(tmp_path, resume=True, seed=9))
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_resume_says_where_it_goes_on(tmp_path, capsys):
    train(config(tmp_path, epochs=1, resume=True))
    assert "yet, starting at step 0" in capsys.readouterr().out.replace("\n", " ")
    train(config(tmp_path, epochs=2, resume=True))
    assert "step_00000002" in capsys.readouterr().out.replace("\n", "")


def test_resume_refuses_other_settings_and_names_them(tmp_path):
    train(config(tmp_path, epochs=1))
    with pytest.raises(ConfigError, match=r"cannot resume with other settings \(optimizer.lr: 0.001 -> 0.1\)"):
        train(config(tmp_path, resume=True, optimizer=dataclasses.replace(config(tmp_path).optimizer, lr=0.1)))


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    trainer = Trainer(config(tmp_path))
    with torch.no_grad():
        next(trainer.state.model.parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1; lower optimizer.lr"):
        trainer.run_to_end()


def test_a_network_that_does_not_fit_the_images_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="model=unet: image_size is 8, expected a multiple of 16"):
        Trainer(config(tmp_path, model=ModelConfig("unet", 4, [1, 1, 1, 1, 1])))


def test_settings_are_checked_without_the_command_line_too(tmp_path):
    with pytest.raises(ConfigError, match="epochs"):
        Trainer(config(tmp_path, epochs=0))


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"= 1500 images a step, the training half has 898"):
        Trainer(config(tmp_path, data=DataConfig(batch_size=500)))
