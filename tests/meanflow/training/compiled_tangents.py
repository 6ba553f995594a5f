"""Run in a process of its own, as every trace of a derivative: the checks of a run with `backend=compile`."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.config.networks import DiTConfig
from fullstride.meanflow.config.schema import GuardConfig, LossConfig
from fullstride.meanflow.objective import loss as objective
from fullstride.meanflow.objective.derivative import velocity_and_derivative
from fullstride.meanflow.training import derivative_check as tangents
from fullstride.meanflow.training.trainer import Trainer
from tests.meanflow.training.test_trainer import config

COMPILE = torch.compile
# A trace of a whole step takes as long as the network has layers.
NETWORKS = {"dit": DiTConfig(name="dit_tiny", width=16, depth=1, heads=2, qk_norm=True)}


def trainer_of(folder: str, name: str, precision: str, split: str = "auto", check_step: bool = False) -> Trainer:
    """A run with that network."""
    guard = GuardConfig(check_tangents=True, check_step=check_step)
    settings = {"model": NETWORKS[name], "precision": precision, "loss": LossConfig(split=split), "guard": guard}
    return Trainer(config(Path(folder) / name, backend="compile", epochs=1, gradient_accumulation_steps=1, **settings))


def check_of(folder: str, name: str, precision: str, split: str = "auto") -> Callable[[], dict | None]:
    """The check of such a run, which compares no steps: then the derivative is compiled for it."""
    trainer = trainer_of(folder, name, precision, split)
    run = trainer.config, trainer.objective, trainer.state
    return functools.partial(tangents.check_derivative, *run, *next(trainer.batches))


def without_inductor(*args: Any, options: Any = None, **kwargs: Any) -> Any:
    """torch.compile, whose code is not generated."""
    return COMPILE(*args, backend="aot_eager", **kwargs)


def off(*args: Any, **kwargs: Any) -> Any:
    """The velocity and its derivative, which is off by a tenth when compiled."""
    u, dudt = velocity_and_derivative(*args, **kwargs)
    return u, dudt * 0.9 if torch.compiler.is_compiling() else dudt


def right(folder: str) -> None:
    """The derivative passes."""
    report = check_of(folder, "dit", "bf16")()
    assert report is not None
    assert 0 < report["tangent"] < report["tolerance"] / 2


def right_step(folder: str) -> None:
    """The compiled step passes."""
    trainer = trainer_of(folder, "dit", "fp32", "static", check_step=True)
    trainer.run_to_end()
    errors = trainer.step.errors
    assert 0 < errors["backend=compile, other weights"] < 1e-4, errors


def wrong(folder: str) -> None:
    """If no steps are compared, the check of du/dt sees what is wrong."""
    objective.velocity_and_derivative = off
    with pytest.raises(ConfigError, match="backend=compile .* by torch.func.jvp of plain operations in fp64"):
        check_of(folder, "dit", "fp32", "static")()


def wrong_step(folder: str) -> None:
    """It is seen in the compiled step, although the last layer, behind which the derivative is, starts as zero."""
    objective.velocity_and_derivative = off
    trainer = trainer_of(folder, "dit", "fp32", "static", check_step=True)
    with pytest.raises(ConfigError, match="backend=compile, other weights: the (loss|gradients)"):
        trainer.run_to_end()
    assert trainer.state.position.step == 0


def main(folder: str, *cases: str) -> None:
    """Check cases by name, compiled by AOT autograd."""
    torch.compile = without_inductor
    for case in cases:
        {"right": right, "right_step": right_step, "wrong": wrong, "wrong_step": wrong_step}[case](f"{folder}/{case}")


if __name__ == "__main__":
    main(*sys.argv[1:])
