"""Run in a process of its own, as every trace of a derivative: the check of a run with `backend=compile`."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow import objective, tangents
from fullstride.meanflow.config import LossConfig
from fullstride.meanflow.derivative import velocity_and_derivative
from fullstride.meanflow.trainer import Trainer
from tests.meanflow.test_tangents import MODELS
from tests.meanflow.test_trainer import config


def check_of(folder: str, name: str, precision: str, split: str = "auto") -> Callable[[], dict | None]:
    """The check of a run with that network."""
    settings = {"model": MODELS[name], "precision": precision, "loss": LossConfig(split=split)}
    trainer = Trainer(config(Path(folder) / name, backend="compile", **settings))
    return functools.partial(tangents.check_derivative, trainer.update, trainer.state, *next(trainer.batches))


def main(folder: str) -> None:
    """Compiled by AOT autograd, the derivative passes; one that is off by a tenth when compiled is refused."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    for name, precision in (("dit", "bf16"), ("unet", "fp32")):
        report = check_of(folder, name, precision)()
        assert report is not None
        assert 0 < report["tangent"] < report["tolerance"] / 2

    def wrong(*args, **kwargs):
        u, dudt = velocity_and_derivative(*args, **kwargs)
        return u, dudt * 0.9 if torch.compiler.is_compiling() else dudt

    objective.velocity_and_derivative = wrong
    with pytest.raises(ConfigError, match="backend=compile .* by torch.func.jvp of plain operations in fp64"):
        check_of(f"{folder}/wrong", "unet", "fp32", "static")()


if __name__ == "__main__":
    main(*sys.argv[1:])
