import dataclasses
import itertools
import json
import signal
import sys
from pathlib import Path

import pytest
import torch

from fullstride.errors import ConfigError, OutOfMemory, Preempted
from fullstride.meanflow.checkpoints.folder import checkpoints, find_checkpoint, read_group
from fullstride.meanflow.config.networks import UNetConfig
from fullstride.meanflow.config.presets import LOSSES, MODELS
from fullstride.meanflow.config.schema import (
    DataConfig,
    EmaConfig,
    EvalConfig,
    GuardConfig,
    LossConfig,
    OptimizerConfig,
    TrainConfig,
)
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.order import epoch_orders
from fullstride.meanflow.objective.improved import ImprovedMeanFlow
from fullstride.meanflow.sampling.generate import load_generator
from fullstride.meanflow.sampling.samplers import sample
from fullstride.meanflow.training import evaluation_schedule as evaluations
from fullstride.meanflow.training.build import build_state
from fullstride.meanflow.training.objective import build_loss
from fullstride.meanflow.training.preflight import preflight
from fullstride.meanflow.training.state import RunState, changed_settings, load_streams
from fullstride.meanflow.training.step import schedule
from fullstride.meanflow.training.trainer import Trainer, train
from fullstride.runs.folder import read_metrics
from fullstride.runs.survey import summary
from fullstride.step.torch.body import Body

# Odd; two steps of two micro-batches take two thirds of the digits.
BATCH = 151


def config(folder: Path, **kwargs) -> TrainConfig:
    """Two optimizer steps an epoch of a network of a few thousand weights, with everything random switched on."""
    base = TrainConfig(
        data=DataConfig(batch_size=BATCH),
        model=UNetConfig(
            channels=4,
            channel_mult=[1, 2],
            num_blocks=1,
            attention_resolutions=[],
            dropout=0.2,
            class_conditional=True,
        ),
        loss=LossConfig(meanflow_ratio=0.25),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2, decay="cosine", grad_clip=1.0),
        ema=EmaConfig([0.9, 0.5]),
        guard=GuardConfig(check_tangents=False),
        epochs=3,
        gradient_accumulation_steps=2,
        device="cpu",
        save_every=1,
        log_every=1,
        run_name="run",
        output_dir=str(folder),
    )
    return dataclasses.replace(base, **kwargs)


def groups(path: Path) -> dict[str, torch.Tensor]:
    names = ("model", "ema_0.9", "ema_0.5", "optimizer", "rng", "guard")
    return {f"{n}/{k}": v for n in names for k, v in read_group(path, n).items()}


def assert_identical(a: Path, b: Path) -> None:
    one, two = groups(find_checkpoint(a)), groups(find_checkpoint(b))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)


def learned(run: Path) -> list[dict]:
    return [
        {k: v for k, v in line.items() if k not in ("images_per_second", "seconds_per_step")}
        for line in read_metrics(run)
        if "tangents" not in line
    ]


def test_a_run_learns_and_writes_what_it_did(tmp_path):
    run = train(config(tmp_path, epochs=6, data=DataConfig(batch_size=223)))
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["images"] == 12 * 446
    assert sum(x["squared_error_fm"] for x in lines[-3:]) < 0.97 * sum(x["squared_error_fm"] for x in lines[:3])
    assert [p.name for p in checkpoints(run)] == [f"step_{2 * e:08d}" for e in range(4, 7)]
    assert json.loads((run / "config.json").read_text())["epochs"] == 6
    moved = groups(find_checkpoint(run))
    assert all(moved[k].isfinite().all() for k in moved)


@pytest.mark.parametrize("channels_last", [False, True])
def test_resume_is_bit_identical_to_a_run_without_a_break(tmp_path, channels_last):
    # A constant schedule for both: a cosine knows how long its run is.
    given = {"optimizer": OptimizerConfig(lr=1e-3, grad_clip=1.0), "channels_last": channels_last}
    straight = train(config(tmp_path / "a", **given))
    train(config(tmp_path / "b", **given, epochs=1))
    resumed = train(config(tmp_path / "b", **given, resume=True))
    assert_identical(straight, resumed)
    assert learned(straight) == learned(resumed)


def test_channels_last_is_the_same_training_in_another_memory_order(tmp_path):
    model = dataclasses.replace(config(tmp_path).model, dropout=0.0)  # masks follow the order
    plain, last = (
        Trainer(config(tmp_path, model=model, channels_last=on, run_name=f"channels_last={on}")) for on in (False, True)
    )
    metrics = [[t._step(*next(t.batches)) for _ in range(3)][-1] for t in (plain, last)]
    torch.testing.assert_close(metrics[1], metrics[0], rtol=1e-4, atol=0)
    state, images = last.state, 0
    for p in state.model.parameters():
        for x in (p, state.optimizer.state[p]["exp_avg"]) if p.ndim == 4 else ():
            assert x.is_contiguous(memory_format=torch.channels_last)
            images += not x.is_contiguous()
    assert images > 10


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)], ids=["term", "int"]
)
def test_a_stop_signal_saves_in_mid_epoch_and_resume_goes_on_exactly(tmp_path, monkeypatch, number, error):
    straight = train(config(tmp_path / "a"))
    stopped = Trainer(config(tmp_path / "b"))
    signalled(stopped, monkeypatch, 2, number)
    before = signal.getsignal(number)
    with pytest.raises(error, match=r"saved .*step_00000003; to continue, run the same command with resume=true$"):
        stopped.run_to_end()
    assert signal.getsignal(number) is before
    found = summary(stopped.run)
    code = 0 if number == signal.SIGTERM else 130
    assert (found.state, found.exit_code, found.step, found.steps) == ("stopped", code, 3, stopped.total_steps)
    resumed = train(config(tmp_path / "b", resume=True))
    assert summary(resumed).state == "finished"
    assert_identical(straight, resumed)
    assert learned(straight) == learned(resumed)


def test_a_stopped_run_that_replaced_another_is_not_advised_to_replace_itself(tmp_path, monkeypatch):
    trainer = Trainer(config(tmp_path, overwrite=True))
    signalled(trainer, monkeypatch, 1, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="the same command with resume=true in place of overwrite=true$"):
        trainer.run_to_end()


def test_a_stop_at_the_last_step_of_an_epoch_loses_none_of_the_next_ones_records(tmp_path, monkeypatch):
    """The position is at the old epoch's end, and moves on before the first record is asked for."""
    straight = train(config(tmp_path / "a"))
    stopped = Trainer(config(tmp_path / "b"))
    signalled(stopped, monkeypatch, 3)
    with pytest.raises(Preempted, match="step_00000004"):
        stopped.run_to_end()
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
    trainer = Trainer(config(tmp_path, optimizer=OptimizerConfig(), loss=LOSSES["mse"]()))
    model, generator = trainer.state.model.eval(), trainer.state.generator
    before = generator.get_state()
    raw, labels = next(trainer.batches)
    assert raw.shape == (2 * BATCH, 1, 8, 8)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for images, own in zip(raw.split(BATCH), labels.split(BATCH), strict=True):
        loss, _ = trainer.objective.meanflow(model, images, own, generator=generator)
        for total, g in zip(expected, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            total += g / 2
    generator.set_state(before)
    trainer._step(raw, labels)
    for p, e in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, e, rtol=1e-4, atol=1e-6)


def test_an_epoch_takes_every_image_at_most_once(tmp_path):
    trainer = Trainer(config(tmp_path))
    made = epoch_orders(trainer.config, trainer.data.train, trainer.steps, 0, 0, trainer.processes)
    first, second = next(made).flatten(), next(made).flatten()
    assert len(first) == len(first.unique()) == 2 * 2 * BATCH
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", [pytest.param("imf", marks=pytest.mark.thorough), "imf_ema"])
def test_improved_meanflow_trains_and_goes_on_exactly(name, tmp_path):
    given = {"loss": LOSSES[name](), "optimizer": OptimizerConfig(lr=1e-3, grad_clip=1.0)}
    straight = train(config(tmp_path / "a", epochs=2, **given))
    train(config(tmp_path / "b", epochs=1, **given))
    assert_identical(straight, train(config(tmp_path / "b", epochs=2, **given, resume=True)))
    other = train(config(tmp_path / "c", epochs=2, **(given | {"loss": LossConfig()})))
    assert learned(straight) != learned(other)
    with pytest.raises(ConfigError, match=rf"cannot resume with other settings \(loss.name: {name} -> meanflow\)"):
        train(config(tmp_path / "a", resume=True, **(given | {"loss": LossConfig()})))


def test_imf_ema_goes_along_the_velocity_of_the_first_average(tmp_path):
    found = []
    for name in ("imf", "imf_ema"):
        given = {"loss": LOSSES[name](), "ema": EmaConfig(decays=[0.9, 0.5]), "optimizer": OptimizerConfig(lr=1e-2)}
        trainer = Trainer(config(tmp_path / name, **given))
        loss = trainer.objective.meanflow
        assert isinstance(loss, ImprovedMeanFlow)
        assert loss.average is (trainer.state.ema.models[0.9] if name == "imf_ema" else None)
        for _ in range(6):
            trainer._step(*next(trainer.batches))
        found.append([p.detach().clone() for p in trainer.state.model.parameters()])
    # The first steps are alike: an average begins as its network, and a last layer of zeros has no derivative.
    assert not all(map(torch.equal, *found))


def test_imf_ema_without_an_average_is_refused_and_is_not_imf():
    with pytest.raises(ValueError, match="loss=imf_ema without averages, expected those of the network"):
        build_loss(LOSSES["imf_ema"]())


def test_bf16_trains_with_fp32_weights(tmp_path):
    run = train(config(tmp_path, precision="bf16", epochs=1))
    assert all(
        v.dtype == torch.float32
        for k, v in groups(find_checkpoint(run)).items()
        if k.split("/")[0] not in ("rng", "guard")
    )
    assert all(x["loss"] > 0 for x in read_metrics(run))


def test_an_evaluation_at_the_end_of_an_epoch_is_made_once_however_often_the_run_is_stopped(tmp_path, monkeypatch):
    class Fake:
        made = 0

        def __init__(self, *args):
            pass

        def meanflow_scores(self, model, num_classes):
            Fake.made += 1
            return {"meanflow 1": {"energy_distance": 1.5}}

    monkeypatch.setattr(evaluations, "Evaluator", Fake)
    for stopped_after in (2, 1, 1):  # the last step of an epoch, then twice a first one, which is not saved
        trainer, made = Trainer(config(tmp_path, eval_every=1, epochs=2, save_every=0, resume=True)), []
        step = trainer._step

        def stopping(raw, labels, step=step, made=made, last=stopped_after):
            made.append(step(raw, labels))
            if len(made) == last:
                signal.raise_signal(signal.SIGTERM)
            return made[-1]

        monkeypatch.setattr(trainer, "_step", stopping)
        with pytest.raises(Preempted):
            trainer.run_to_end()
    run = train(config(tmp_path, eval_every=1, epochs=2, save_every=0, resume=True))
    assert [line["step"] for line in read_metrics(run) if "evaluation" in line] == [2, 4]
    assert Fake.made == 2


def test_evaluation_is_logged_beside_its_floor(tmp_path, monkeypatch):
    class Fake:
        def __init__(self, *args):
            pass

        def meanflow_scores(self, model, num_classes):
            assert num_classes == 10
            return {"meanflow 1": {"energy_distance": 1.5}, "floor": {"energy_distance": 0.5}}

    monkeypatch.setattr(evaluations, "Evaluator", Fake)
    lines = read_metrics(train(config(tmp_path, eval_every=2, epochs=3)))
    assert [line["step"] for line in lines if "evaluation" in line] == [4, 6]


def rates(config: OptimizerConfig, *steps: int) -> list[float]:
    factor = schedule(config, 100)
    assert factor is not None
    return [factor(torch.tensor(step)).item() for step in steps]


def test_learning_rate_warms_up_then_follows_the_cosine():
    cosine = OptimizerConfig(lr=2.0, warmup_steps=4, decay="cosine")
    assert rates(cosine, 0, 50, 100) == pytest.approx([0.25, 0.5, 0.0])
    assert rates(OptimizerConfig(lr=2.0, warmup_steps=4), 1, 3, 70) == pytest.approx([0.5, 1.0, 1.0])
    assert schedule(OptimizerConfig(lr=2.0), 100) is None


def test_an_earlier_run_is_never_lost_unasked(tmp_path):
    run = train(config(tmp_path, epochs=1))
    with pytest.raises(ConfigError, match=r"already holds a run; continue it \(resume=true\)"):
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


def test_impossible_settings_cost_no_earlier_run(tmp_path, monkeypatch):
    run = train(config(tmp_path, epochs=1))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    five_levels = UNetConfig(channels=4, channel_mult=[1, 1, 1, 1, 1])
    with pytest.raises(ConfigError, match="expected a multiple of 16"):
        train(config(tmp_path, overwrite=True, model=five_levels))
    inception = EvalConfig(features=["inception"], inception_weights="w.pth")
    with pytest.raises(ConfigError, match="w.pth: no such file"):
        train(config(tmp_path, overwrite=True, evaluation=inception))
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="track=trackio: trackio is not installed"):
        train(config(tmp_path, overwrite=True, track="trackio"))
    with pytest.raises(ConfigError, match="cannot resume with other settings"):
        train(config(tmp_path, resume=True, seed=9))
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_what_evaluations_cannot_have_is_refused_before_the_first_step(tmp_path):
    wanted = EvalConfig(precision="tf32")
    with pytest.raises(ConfigError, match=r"evaluation.precision=tf32: TF32 is CUDA's, the device is cpu"):
        Trainer(config(tmp_path, eval_every=1, evaluation=wanted))
    with pytest.raises(ConfigError, match=r"evaluation.backend=graph: CUDA graphs are CUDA's, the device is cpu"):
        Trainer(config(tmp_path, eval_every=1, evaluation=EvalConfig(backend="graph")))
    assert Trainer(config(tmp_path, evaluation=wanted)).run.is_dir()


def test_resume_says_where_it_goes_on(tmp_path, capsys):
    train(config(tmp_path, epochs=1, resume=True))
    assert "yet, starting at step 0" in capsys.readouterr().out.replace("\n", " ")
    train(config(tmp_path, epochs=2, resume=True))
    assert "step_00000002" in capsys.readouterr().out.replace("\n", "")


def test_resume_refuses_other_settings_and_names_them(tmp_path):
    train(config(tmp_path, epochs=1))
    with pytest.raises(ConfigError, match=r"cannot resume with other settings \(optimizer.lr: 0.001 -> 0.1\)"):
        train(config(tmp_path, resume=True, optimizer=dataclasses.replace(config(tmp_path).optimizer, lr=0.1)))


def test_a_checkpoint_from_before_a_key_had_its_default(tmp_path):
    wanted = dataclasses.asdict(config(tmp_path))
    older = {**wanted, "loss": {key: value for key, value in wanted["loss"].items() if key != "weighting"}}
    assert changed_settings(older, wanted) == {}
    other = {**wanted, "loss": wanted["loss"] | {"weighting": "huber"}}
    assert changed_settings(older, other) == {"loss.weighting": "adaptive -> huber"}


def test_a_run_goes_on_by_another_split_of_the_same_loss(tmp_path):
    train(config(tmp_path, epochs=1))
    loss = dataclasses.replace(config(tmp_path).loss, split="static")
    assert learned(train(config(tmp_path, epochs=2, resume=True, loss=loss)))[-1]["step"] == 4
    with pytest.raises(ConfigError, match=r"cannot resume with other settings \(loss.split: static -> bernoulli\)"):
        train(config(tmp_path, resume=True, loss=dataclasses.replace(loss, split="bernoulli")))


def test_a_run_goes_on_in_another_memory_order_by_another_name_of_its_device(tmp_path):
    """Steps agree up to rounding: the content of a checkpoint has no memory order."""
    model = dataclasses.replace(config(tmp_path).model, dropout=0.0)  # whose masks follow the order
    given = {"model": model, "optimizer": OptimizerConfig(lr=1e-3, grad_clip=1.0)}
    straight = train(config(tmp_path / "a", epochs=2, **given))
    train(config(tmp_path / "b", epochs=1, **given, channels_last=True))
    resumed = train(config(tmp_path / "b", epochs=2, resume=True, **given, device="auto", backend="auto"))
    wanted, found = (read_group(find_checkpoint(run), "model") for run in (straight, resumed))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    trainer = Trainer(config(tmp_path, epochs=9))
    with torch.no_grad():
        next(trainer.state.model.parameters()).fill_(float("nan"))
    with pytest.raises(
        FloatingPointError, match=r"10 steps in a row .* no checkpoint to return to; lower optimizer.lr"
    ):
        trainer.run_to_end()


def test_a_network_that_does_not_fit_the_images_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="model=unet: image_size is 8, expected a multiple of 16"):
        Trainer(config(tmp_path, model=UNetConfig(channels=4, channel_mult=[1, 1, 1, 1, 1])))


def test_settings_are_checked_without_the_command_line_too(tmp_path):
    with pytest.raises(ConfigError, match="epochs"):
        Trainer(config(tmp_path, epochs=0))


def test_what_is_asked_before_a_run_leaves_nothing(tmp_path):
    before = torch.get_rng_state()
    data, steps = preflight(config(tmp_path))
    assert (data.name, steps) == ("digits", 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(tmp_path.iterdir())


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"= 1000 images a step, the training half has 898"):
        Trainer(config(tmp_path, data=DataConfig(batch_size=500)))


def signalled(trainer: Trainer, monkeypatch, after: int, number: int = signal.SIGTERM) -> None:
    """A signal comes when so many steps were made and the next one is."""
    step = trainer._step

    def interrupted(raw, labels):
        metrics = step(raw, labels)
        if trainer.state.position.step == after:
            signal.raise_signal(number)
        return metrics

    monkeypatch.setattr(trainer, "_step", interrupted)


def poisoned(trainer: Trainer, monkeypatch, steps: set[int]) -> None:
    """Make the loss of some steps not finite, once each."""
    gradients, left, state = Body.gradients, set(steps), trainer.state

    def wrong(body, batch):
        metrics = gradients(body, batch)
        if state.position.step in left:
            if body is trainer.step.body:  # and not the one that it is compared with
                left.discard(state.position.step)
            for p in state.model.parameters():
                assert p.grad is not None
                p.grad.fill_(float("nan"))
        return metrics

    monkeypatch.setattr(Body, "gradients", wrong)


def test_a_harmful_step_is_skipped_whole_and_the_next_one_counts(tmp_path, monkeypatch):
    trainer = Trainer(config(tmp_path))
    poisoned(trainer, monkeypatch, {1})
    before = {}
    for step in range(3):
        weights = [p.detach().clone() for p in trainer.state.model.parameters()]
        trainer._step(*next(trainer.batches))
        trainer.state.position.step += 1
        same = [torch.equal(a, b) for a, b in zip(weights, trainer.state.model.parameters(), strict=True)]
        before[step] = all(same)
    assert before == {0: False, 1: True, 2: False}
    assert all(p.isfinite().all() for p in trainer.state.model.parameters())


def test_after_too_many_harmful_steps_the_last_checkpoint_is_restored_and_said(tmp_path, monkeypatch, capfd):
    guard = GuardConfig(max_skips=2)
    trainer = Trainer(config(tmp_path, guard=guard, epochs=4))
    poisoned(trainer, monkeypatch, {4, 5, 6})
    run = trainer.run_to_end()
    assert "went back to" in capfd.readouterr().err
    lines = read_metrics(run)
    (restored,) = [line for line in lines if "restored" in line]
    assert restored["restored"] == "step_00000004"  # at step 6 the weights were not known to be good
    assert trainer.state.position.attempt == 1
    assert trainer.state.position.step == 8
    assert all(p.isfinite().all() for p in trainer.state.model.parameters())
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps))


def test_a_resumed_run_tells_only_of_steps_that_it_skips_itself(tmp_path, monkeypatch, capfd):
    first = Trainer(config(tmp_path, epochs=1))
    with monkeypatch.context() as patched:
        poisoned(first, patched, {0})
        first.run_to_end()
    assert capfd.readouterr().err.count("1 steps skipped so far") == 1
    assert read_metrics(train(config(tmp_path, epochs=2, resume=True)))[-1]["skipped_steps"] == 1
    assert "skipped so far" not in capfd.readouterr().err


def test_no_attempt_of_a_run_has_the_random_numbers_of_another_seed(tmp_path):
    """A generator on the CPU takes the low 32 bits of its seed: attempt 2 must not come down to a seed nearby."""
    run = config(tmp_path)
    state = build_state(run, load_data(run.data), torch.device("cpu"))
    drawn = []
    for seed, attempt in itertools.product((0, 1, 2, 3, 4), (1, 2, 3, 4)):
        state.position.attempt = attempt
        state.reseed(seed)
        drawn.append(torch.rand(4, generator=state.generator))
    drawn += [torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    assert len(torch.stack(drawn).unique(dim=0)) == len(drawn)


def test_a_run_that_keeps_diverging_gives_up_with_its_checkpoint_kept(tmp_path, monkeypatch):
    guard = GuardConfig(max_skips=1, max_rollbacks=2)
    trainer = Trainer(config(tmp_path, guard=guard, epochs=30))
    gradients = Body.gradients

    def wrong(body, batch):
        metrics = gradients(body, batch)
        return metrics | {"loss": metrics["loss"] * float("nan")} if trainer.state.position.step >= 2 else metrics

    monkeypatch.setattr(Body, "gradients", wrong)
    with pytest.raises(FloatingPointError, match=r"2 times after .*step_0+2, which stays"):
        trainer.run_to_end()
    assert [p.name for p in checkpoints(trainer.run)] == ["step_00000002"]


def _no_room_above(most: int, monkeypatch) -> None:
    """A forward pass of more samples does not fit into memory."""
    forward = Body.forward

    def limited(body, part):
        if len(part["raw"]) > most:
            raise torch.OutOfMemoryError("no room")
        return forward(body, part)

    monkeypatch.setattr(Body, "forward", limited)


TOOK = r"at data.batch_size=120 gradient_accumulation_steps=2: the peak was \d+\.\d\d GiB resident; "


@pytest.mark.parametrize(
    ("batch", "parts", "message"),
    [
        (
            120,
            2,
            TOOK + "data.batch_size=60 gradient_accumulation_steps=4 takes less memory for as many images per step;",
        ),
        (119, 1, "data.batch_size=17 gradient_accumulation_steps=7 takes less"),
        (113, 1, "there is no smaller batch with as many images per step; choose a smaller model"),
    ],
)
def test_out_of_memory_says_what_it_took_and_what_takes_less(tmp_path, monkeypatch, batch, parts, message):
    trainer = Trainer(config(tmp_path, data=DataConfig(batch_size=batch), gradient_accumulation_steps=parts))
    _no_room_above(50, monkeypatch)
    with pytest.raises(OutOfMemory, match=message):
        trainer.run_to_end()


def test_a_full_disk_costs_neither_the_run_nor_a_checkpoint(tmp_path, monkeypatch, capfd):
    save, failures = RunState.save, [2]

    def full(state, folder, config):
        if state.position.step in failures:
            raise OSError(28, "No space left on device")
        return save(state, folder, config)

    monkeypatch.setattr(RunState, "save", full)
    run = train(config(tmp_path))
    assert "not saved at step 2" in capfd.readouterr().err
    assert [p.name for p in checkpoints(run)] == ["step_00000004", "step_00000006"]
    failures.append(10)
    with pytest.raises(OSError, match=r"cannot save step 10 .*step_00000008 is intact: free space"):
        train(config(tmp_path, optimizer=OptimizerConfig(), run_name="other", epochs=5))


def test_evaluation_that_a_stop_cut_off_is_made_up_for(tmp_path, monkeypatch):
    class Slow:
        calls = 0

        def __init__(self, *args):
            pass

        def meanflow_scores(self, model, num_classes):
            Slow.calls += 1
            if Slow.calls == 1:
                signal.raise_signal(signal.SIGTERM)
            return {"meanflow 1": {"energy_distance": 1.5}}

    monkeypatch.setattr(evaluations, "Evaluator", Slow)
    with pytest.raises(Preempted, match="step_00000004"):
        train(config(tmp_path, eval_every=2))
    run = train(config(tmp_path, eval_every=2, resume=True))
    assert [line["step"] for line in read_metrics(run) if "evaluation" in line] == [4, 6]


def test_other_data_under_the_same_settings_are_refused(tmp_path):
    train(config(tmp_path, epochs=1))
    other = Trainer.__new__(Trainer)
    other.config = config(tmp_path, resume=True)
    state = build_state(other.config, load_data(other.config.data), torch.device("cpu"))
    state.data = dataclasses.replace(state.data, fingerprint="other")
    with pytest.raises(ConfigError, match=r"cannot resume with other data \(fingerprint: .* -> other\)"):
        state.restore(checkpoints(tmp_path / "run")[-1], other.config)


@pytest.mark.parametrize(
    ("name", "split"), [("unet_tiny", "shared"), ("song_unet_tiny", "bernoulli"), ("dit_tiny", "static")]
)
def test_every_family_of_networks_trains(tmp_path, name, split):
    """Guidance, dropped labels, augmentation and mirroring included, where a family has them."""
    loss = LossConfig(omega=1.5, kappa=0.2, label_dropout=0.2, split=split)
    data = DataConfig(batch_size=BATCH, hflip=True, augment=0.3 if name == "song_unet_tiny" else 0.0)
    run = train(config(tmp_path, model=MODELS[name](class_conditional=True), data=data, loss=loss, epochs=1))
    generator = load_generator(run, "cpu", ema=0.5)
    images = sample(
        generator.model, sampler="meanflow", steps=1, num=3, shape=generator.image_shape, seed=0, num_classes=10
    ).images
    assert images.isfinite().all()
    assert images.shape == (3, 1, 8, 8)


def test_a_run_on_from_before_a_damaged_checkpoint_keeps_what_it_saves(tmp_path, monkeypatch):
    """With keep=1 and a stop before the damaged one's step, nothing else would be left to go on from."""
    constant = OptimizerConfig(lr=1e-3)
    straight = train(config(tmp_path / "a", optimizer=constant))
    train(config(tmp_path / "b", optimizer=constant))
    newest = checkpoints(tmp_path / "b" / "run")[-1]
    (newest / "optimizer.safetensors").unlink()
    resumed = Trainer(config(tmp_path / "b", optimizer=constant, resume=True, keep=1))
    step = resumed._step

    def interrupted(raw, labels):
        signal.raise_signal(signal.SIGTERM)
        return step(raw, labels)

    monkeypatch.setattr(resumed, "_step", interrupted)
    resumed._going = True  # as after a first step
    with pytest.raises(Preempted, match="step_00000005"):
        resumed.run_to_end()
    assert [p.name for p in checkpoints(tmp_path / "b" / "run")] == ["step_00000005", "step_00000006"]
    assert_identical(straight, train(config(tmp_path / "b", optimizer=constant, resume=True)))


def test_a_signal_in_the_first_step_ends_it_at_once_and_changes_nothing(tmp_path, monkeypatch):
    """Compiling it takes minutes, which a scheduler does not wait."""
    run = train(config(tmp_path, epochs=1))
    before = {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()}
    for number, error in ((signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)):
        trainer = Trainer(config(tmp_path, resume=True))
        monkeypatch.setattr(trainer, "_step", lambda *_, number=number: signal.raise_signal(number))
        with pytest.raises(error, match="stopped before the first step, nothing to save"):
            trainer.run_to_end()

    def killed_compiler(*_: object) -> None:
        trainer.stop.signal = signal.SIGINT
        raise RuntimeError("the compiler was killed")

    trainer = Trainer(config(tmp_path, resume=True))
    monkeypatch.setattr(trainer, "_step", killed_compiler)
    with pytest.raises(KeyboardInterrupt, match="stopped before the first step"):
        trainer.run_to_end()
    assert {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()} == before


def test_a_signal_during_a_save_comes_before_the_evaluation(tmp_path, monkeypatch):
    class Slow:
        def __init__(self, *args):
            raise AssertionError("the evaluation began")

    save = RunState.save

    def stopped(state, folder, config):
        signal.raise_signal(signal.SIGTERM)
        return save(state, folder, config)

    monkeypatch.setattr(evaluations, "Evaluator", Slow)
    monkeypatch.setattr(RunState, "save", stopped)
    with pytest.raises(Preempted, match="step_00000002"):
        train(config(tmp_path, eval_every=1))


def test_what_the_end_of_the_run_would_miss_is_refused_before_it_begins(tmp_path, monkeypatch):
    run = train(config(tmp_path, epochs=1))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    inception = EvalConfig(features=["inception"], inception_weights=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="inception"):
        train(config(tmp_path, overwrite=True, eval_every=1, evaluation=inception))
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="trackio is not installed"):
        train(config(tmp_path, overwrite=True, track="trackio"))
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_another_length_is_told_when_a_run_goes_on(tmp_path, capsys):
    train(config(tmp_path, epochs=2))
    capsys.readouterr()
    train(config(tmp_path, epochs=2, resume=True))
    assert capsys.readouterr().out.splitlines()[0].endswith("step_00000004")
    train(config(tmp_path, epochs=1, resume=True))
    told = capsys.readouterr().out.splitlines()[0]
    assert told.endswith("step_00000004; epochs=1 are done already, nothing to train")
    train(config(tmp_path, epochs=3, resume=True))
    told = capsys.readouterr().out.splitlines()[0]
    assert told.endswith("step_00000004; epochs: 2 -> 3, and the cosine schedule is stretched to end there")


def test_averages_of_almost_the_same_decay_are_kept_apart(tmp_path):
    run = train(config(tmp_path, epochs=1, ema=EmaConfig([0.9999999, 0.99999995], warmup=False)))
    one, two = (read_group(find_checkpoint(run), name) for name in ("ema_0.9999999", "ema_0.99999995"))
    assert any(not torch.equal(one[name], two[name]) for name in one)


def test_a_checkpoint_of_another_kind_of_device_is_refused(tmp_path):
    run = train(config(tmp_path, epochs=1))
    tensors = read_group(find_checkpoint(run), "rng")
    generator = torch.Generator()
    load_streams(generator, tensors)
    with pytest.raises(ConfigError, match="made with CUDA device, but the device is cpu"):
        load_streams(generator, tensors | {"cuda": tensors["cpu"]})


def test_overwriting_leaves_no_trace_of_the_earlier_run(tmp_path):
    train(config(tmp_path, epochs=2))
    run = train(config(tmp_path, epochs=1, overwrite=True))
    assert [p.name for p in checkpoints(run)] == ["step_00000002"]
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (RuntimeError("can't allocate memory"), OutOfMemory, "evaluation.batch_size=512: .*4 is saved; to continue"),
        (ConfigError("no weights"), ConfigError, "no weights"),
    ],
)
def test_an_evaluation_that_fails_costs_no_step(tmp_path, monkeypatch, error, raised, message):
    class Failing:
        def __init__(self, *args):
            raise error

    monkeypatch.setattr(evaluations, "Evaluator", Failing)
    with pytest.raises(raised, match=message):
        train(config(tmp_path, eval_every=2, save_every=0))
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step_00000004"]


def test_what_a_stop_saves_among_harmful_steps_is_not_what_a_run_returns_to(tmp_path, monkeypatch, capfd):
    """With keep=1 it would also have been the only one left."""
    guard = GuardConfig(max_skips=3)
    stopped = Trainer(config(tmp_path, guard=guard, epochs=6, keep=1))
    poisoned(stopped, monkeypatch, {4})
    signalled(stopped, monkeypatch, 4)
    with pytest.raises(Preempted, match="step_00000005"):
        stopped.run_to_end()
    assert "step_00000005 was saved after harmful steps (1 in a row)" in capfd.readouterr().err
    assert [p.name for p in checkpoints(stopped.run)] == ["step_00000004", "step_00000005"]
    resumed = Trainer(config(tmp_path, guard=guard, epochs=6, keep=1, resume=True))
    assert resumed.state.position.step == 5
    poisoned(resumed, monkeypatch, {5, 6, 7})
    run = resumed.run_to_end()
    (restored,) = [line for line in read_metrics(run) if "restored" in line]
    assert restored["restored"] == "step_00000004"
    assert [p.name for p in checkpoints(run)] == ["step_00000012"]
