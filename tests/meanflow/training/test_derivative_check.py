import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError, OutOfMemory
from fullstride.jvp import mixed_batch as partial
from fullstride.meanflow.config.networks import DiTConfig, SongUNetConfig
from fullstride.meanflow.config.presets import LOSSES
from fullstride.meanflow.config.schema import EmaConfig, GuardConfig, LossConfig, TrainConfig
from fullstride.meanflow.objective.derivative import JVP_BACKENDS
from fullstride.meanflow.training import derivative_check as tangents_module
from fullstride.meanflow.training.derivative_check import DIFFERENCE_TOLERANCE, TOLERANCE, check_derivative
from fullstride.meanflow.training.trainer import Trainer, train
from fullstride.runs.folder import read_metrics
from tests.meanflow.training.test_trainer import assert_identical, config, learned

CHECKED = GuardConfig(check_tangents=True)


class Sine(torch.autograd.Function):
    """sin, whose forward derivative is off by a factor."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, ctx.factor = inputs
        ctx.save_for_forward(x)
        ctx.save_for_backward(x)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return ctx.saved_tensors[0].cos() * tangents[0] * ctx.factor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple:
        return gradients[0] * ctx.saved_tensors[0].cos(), None


class WithSine(nn.Module):
    """A layer with a sine behind it."""

    def __init__(self, layer: nn.Module, factor: float):
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, x: Tensor) -> Tensor:
        return Sine.apply(self.layer(x), self.factor)  # pyright: ignore[reportReturnType]


def with_sine(factor: float, settings: TrainConfig) -> Trainer:
    """A run whose network has that sine behind its first convolution, and in front of a layer that starts as zero."""
    trainer = Trainer(dataclasses.replace(settings, loss=dataclasses.replace(settings.loss, split="static")))
    trainer.state.model.conv_in = WithSine(trainer.state.model.conv_in, factor)  # pyright: ignore
    return trainer


def checked(trainer: Trainer) -> dict:
    report = check_derivative(trainer.config, trainer.objective, trainer.state, *next(trainer.batches))
    assert report is not None
    return report


def loss(backend: str, **kwargs) -> LossConfig:
    return LossConfig(jvp_backend=backend, **kwargs)


@pytest.mark.parametrize(
    ("backend", "seed"), [("func", 0), pytest.param("forward_ad", 1, marks=pytest.mark.thorough), ("two_pass", 2)]
)
def test_a_wrong_derivative_is_refused(tmp_path, backend, seed):
    message = (
        rf"^loss.jvp_backend={backend} backend=eager precision=fp32: du/dt of model=unet is wrong before the first "
        r"step: tangent is worst at \[\d, 0, \d, \d\]: [-0-9.e]+, expected [-0-9.e]+ by central differences .* Repair "
        r"the network, or use loss.jvp_backend=finite_difference, .*; set guard.check_tangents=false to train anyway$"
    )
    settings = config(tmp_path, loss=loss(backend), seed=seed)
    with pytest.raises(ConfigError, match=message):
        checked(with_sine(1.01, settings))
    assert checked(with_sine(1.0, dataclasses.replace(settings, run_name="right")))["tangent"] > 0


def test_it_is_refused_before_the_first_step(tmp_path):
    trainer = with_sine(1.01, config(tmp_path, guard=CHECKED))
    with pytest.raises(ConfigError, match="du/dt of model=unet is wrong"):
        trainer.run_to_end()
    assert trainer.state.position.step == 0


def test_a_wrong_derivative_trains_where_none_is_asked_for(tmp_path):
    assert checked(with_sine(0.0, config(tmp_path, loss=loss("finite_difference"))))["tangent"] < 0.1
    trainer = with_sine(0.0, config(tmp_path / "off", epochs=1))
    trainer.run_to_end()
    assert trainer.state.position.step == 2


def test_a_run_is_bit_identical_with_and_without_the_check(tmp_path):
    runs = [
        train(config(tmp_path / str(on), epochs=1, guard=GuardConfig(check_tangents=on), data=augmented()))
        for on in (True, False)
    ]
    assert_identical(*runs)
    assert learned(runs[0]) == learned(runs[1])
    reports = [[line for line in read_metrics(run) if "tangents" in line] for run in runs]
    assert [len(lines) for lines in reports] == [1, 0]


def augmented() -> Any:
    data = config(Path()).data
    return dataclasses.replace(data, hflip=True)


def test_a_resumed_run_checks_again_and_goes_on_exactly(tmp_path):
    straight = train(config(tmp_path / "a", epochs=2, optimizer=constant()))
    for epochs in (1, 2):
        settings = config(tmp_path / "b", epochs=epochs, optimizer=constant(), resume=epochs == 2, guard=CHECKED)
        resumed = train(settings)
    assert_identical(straight, resumed)
    lines = [line for line in read_metrics(resumed) if "tangents" in line]
    assert [line["step"] for line in lines] == [0, 2]
    for line in lines:
        found = line["tangents"]
        assert found["backend"] == "func"
        assert 0 < found["tangent"] < found["tolerance"] == TOLERANCE["fp32"]
        assert 0 <= found["difference"] < 1e-6
        assert found["seconds"] > 0


def constant() -> Any:
    return dataclasses.replace(config(Path()).optimizer, decay="constant")


MODELS = {
    "unet": dataclasses.replace(config(Path()).model, channel_mult=[1], attention_resolutions=[8]),
    "song_unet": SongUNetConfig(channels=8, channel_mult=[1], num_blocks=1, attention_resolutions=[8]),
    "dit": DiTConfig(name="dit_tiny", width=16, depth=2, heads=2, qk_norm=True),
}


@pytest.mark.parametrize(
    ("name", "backend", "precision"),
    [
        *(("dit", backend, "fp32") for backend in JVP_BACKENDS),
        ("dit", "finite_difference", "bf16"),
        ("unet", "func", "bf16"),
        ("song_unet", "func", "fp32"),
    ],
)
def test_every_network_passes_by_every_backend(tmp_path, name, backend, precision):
    """With dropout and labels on; but differences in bf16 are no derivative, and are refused unless taken in fp32."""
    model = dataclasses.replace(MODELS[name], class_conditional=True)
    trainer = Trainer(config(tmp_path, model=model, precision=precision, loss=loss(backend)))
    if (backend, precision) == ("finite_difference", "bf16"):
        with pytest.raises(ConfigError, match="use loss.jvp_backend=func, or add loss.jvp_precision=fp32"):
            checked(trainer)
        full = loss(backend, jvp_precision="fp32")
        trainer = Trainer(config(tmp_path, model=model, precision=precision, loss=full, run_name="full"))
    report = checked(trainer)
    rough = backend == "finite_difference"
    assert report["tolerance"] == (DIFFERENCE_TOLERANCE if rough else TOLERANCE[precision])
    assert 0 < report["tangent"] < (0.05 if rough else TOLERANCE[precision] / 2)


def test_augmentation_and_guidance_and_any_split_pass(tmp_path):
    data = dataclasses.replace(config(Path()).data, augment=0.5)
    model = dataclasses.replace(MODELS["song_unet"], class_conditional=True)
    guided = loss("func", omega=1.5, label_dropout=0.1, split="bernoulli", time_law="v1", use_batch_time=True)
    assert 0 < checked(Trainer(config(tmp_path, data=data, model=model, loss=guided)))["tangent"] < 1e-5


@pytest.mark.parametrize(("name", "precision"), [("song_unet", "fp32"), ("dit", "bf16")])
def test_the_derivative_of_some_samples_is_checked_beside_one_without(tmp_path, monkeypatch, name, precision):
    model = dataclasses.replace(MODELS[name], class_conditional=True)
    trainer = Trainer(config(tmp_path, model=model, precision=precision, loss=loss("func", split="shared")))
    assert 0 < checked(trainer)["tangent"] < TOLERANCE[precision] / 2
    right = partial.RULES["linear"]

    def wrong(x: partial.MixedBatch, *args: Any, **kwargs: Any) -> partial.MixedBatch:
        out = right(x, *args, **kwargs)
        return partial.MixedBatch(out.primal, out.tangent * 1.5)

    monkeypatch.setitem(partial.RULES, "linear", wrong)
    with pytest.raises(ConfigError, match="du/dt of model=.* is wrong .* or use loss.split=static"):
        checked(trainer)


def test_nothing_of_the_run_is_touched(tmp_path):
    trainer = Trainer(config(tmp_path))
    state, batch = trainer.state, next(trainer.batches)
    held = {
        "weights": state.model.state_dict(),
        "ema": state.ema.model.state_dict(),
        "rng": {"own": state.generator.get_state(), "torch": torch.get_rng_state()},
    }
    before = copy.deepcopy(held)
    modes = [m.training for m in state.model.modules()]
    assert check_derivative(trainer.config, trainer.objective, state, *batch)
    held["rng"] = {"own": state.generator.get_state(), "torch": torch.get_rng_state()}
    for name, tensors in held.items():
        assert all(torch.equal(x, before[name][key]) for key, x in tensors.items()), name
    assert [m.training for m in state.model.modules()] == modes
    assert all(p.grad is None for p in state.model.parameters())
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", ["unet", pytest.param("song_unet", marks=pytest.mark.thorough), "dit"])
def test_layers_that_start_as_zero_hide_nothing(tmp_path, name):
    """A wrong derivative in the innermost layer of a network whose output starts as zero, or as good as zero."""
    trainer = Trainer(config(tmp_path, model=MODELS[name], loss=loss("func", split="static")))
    model: Any = trainer.state.model
    assert next(reversed(list(model.parameters()))).abs().max() < 1e-3
    inner = model.blocks[1].mlp if name == "dit" else (model.middle[0].block if name == "unet" else model.down[0])
    place = "0" if name == "dit" else "conv1"
    setattr(inner, place, WithSine(getattr(inner, place), 0.9))
    with pytest.raises(ConfigError, match="tangent is worst at"):
        checked(trainer)


def test_without_a_jvp_or_with_broken_weights_there_is_nothing_to_check(tmp_path):
    run = train(config(tmp_path, loss=LOSSES["mse"](), guard=CHECKED, epochs=1))
    assert not any("tangents" in line for line in read_metrics(run))
    trainer = Trainer(config(tmp_path / "nan", ema=EmaConfig([0.9])))
    with torch.no_grad():
        next(trainer.state.model.parameters()).fill_(float("nan"))
    assert check_derivative(trainer.config, trainer.objective, trainer.state, *next(trainer.batches)) is None


def test_out_of_memory_is_said_plainly(tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tangents_module, "check_tangents", full)
    with pytest.raises(
        OutOfMemory, match=r"in the check of du/dt .* GiB; .* set guard.check_tangents=false to skip it$"
    ):
        train(config(tmp_path, guard=CHECKED))


# A trace of each takes a while.
@pytest.mark.parametrize("cases", ["wrong_step", pytest.param("right right_step wrong", marks=pytest.mark.thorough)])
def test_the_compiled_derivative_is_checked_as_compiled(forked, tmp_path, cases):
    (done,) = forked(["tests.meanflow.training.compiled_tangents", str(tmp_path), *cases.split()])
    assert done.returncode == 0, done.stderr[-3000:]
