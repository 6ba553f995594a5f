"""Quality against time: fullstride and the official code train the same network by one recipe for the same time."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fullstride.bench.session import say
from fullstride.device import resolve_device
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.compose import compose
from fullstride.meanflow.config import SongUNetConfig, TrainConfig
from fullstride.meanflow.experiments.jobs import name_of
from fullstride.meanflow.experiments.official import train_official
from fullstride.meanflow.experiments.ours import train_ours
from fullstride.meanflow.experiments.phases import RECIPE
from fullstride.meanflow.experiments.spec import Sampler
from fullstride.meanflow.experiments.watch import Record, Watch
from fullstride.meanflow.sampling import load_generator

CODES = ("fullstride", "official")
EULER: Sampler = ("euler", 50)
# What fullstride's last network is sampled by besides.
LAST: tuple[Sampler, ...] = (("meanflow", 2), EULER)
# The official CIFAR-10 recipe, for minutes instead of days: its network at half the width, so that ten minutes are some
# seventy epochs for the faster code; batch, rate and second moment of the `fashion_mnist` preset; a shorter warm-up and
# average; no dropout, as no image comes up more often than that. docs/experiments.md has what else was tried.
SETTINGS: Mapping[str, str] = RECIPE | {
    "data": "fashion_mnist",
    "data.image_size": "32",
    "data.batch_size": "256",
    "model": "song_unet",
    "model.channels": "64",
    "model.dropout": "0",
    "optimizer.lr": "1e-3",
    "optimizer.beta1": "0.9",
    "optimizer.beta2": "0.99",
    "optimizer.warmup_steps": "500",
    "ema.decays": "[0.999]",
    "ema.period": "16",
    "ema.warmup": "false",
    "evaluation.num_samples": "5000",
    "evaluation.precision": "tf32",
    "epochs": "100000",
    "log_every": "20",
    "keep": "2",
    "backend": "compile+graph",
    "precision": "bf16",
    "channels_last": "true",
    "device": "cuda",
}
SCALES: Mapping[str, Mapping[str, str]] = {
    "gpu": {},
    "smoke": {
        "data": "digits",
        "data.image_size": "0",
        "data.batch_size": "32",
        "model": "song_unet_tiny",
        "model.channels": "8",
        "ema.period": "1",
        "evaluation.num_samples": "16",
        "evaluation.precision": "fp32",
        "backend": "eager",
        "precision": "fp32",
        "device": "cpu",
        "guard.check_tangents": "false",
    },
}


@dataclass(frozen=True)
class Asked:
    """What a call is about.

    Attributes:
        scale: gpu or smoke.
        minutes: of training, start-up and scoring apart.
        runs: the folder of runs.
        overrides: of the recipe, for both codes.

    """

    scale: str = "gpu"
    minutes: float = 10.0
    runs: Path = Path("runs/time-to-quality")
    overrides: tuple[str, ...] = ()

    def config(self, code: str, seed: int) -> TrainConfig:
        """The configuration of a run.

        Raises:
            ConfigError: for a setting that cannot be, or a network that the official code does not have.

        """
        one_of("--scale", self.scale, SCALES)
        one_of("--code", code, CODES)
        given = {key: value for key, _, value in (override.partition("=") for override in self.overrides)}
        place = {"seed": str(seed), "resume": "true", "run_name": f"{code}-{seed}", "output_dir": str(self.folder)}
        settings = {**SETTINGS, **SCALES[self.scale], **given, **place}
        config = compose([f"{key}={value}" for key, value in settings.items()])
        if not isinstance(config.model, SongUNetConfig):
            raise ConfigError(f"model={config.model.name}: the official code has song_unet alone; leave it out")
        return config

    def check(self, code: str, seed: int, official: Path | None) -> None:
        """See that a run can be, before anything begins.

        Raises:
            ConfigError: for settings, a device or a checkout that cannot be used.

        """
        resolve_device(self.config(code, seed).device)
        if code == "official" and official is None:
            raise ConfigError(
                "--code official: expected --official PATH, a checkout of github.com/Gsunshine/py-meanflow"
            )

    @property
    def folder(self) -> Path:
        """Of this scale's runs."""
        return self.runs / self.scale


def run_one(code: str, seed: int, asked: Asked, limit: float, official: Path | None) -> Record:
    """Train one run as far as the limit allows, or go on with it, and score it at its marks and its end.

    Args:
        code: fullstride or official.
        seed: of weights, order, noise and times.
        asked: the recipe.
        limit: seconds after which this process begins nothing more.
        official: the checkout, for the official code.

    Raises:
        ConfigError: for settings, a device or a checkout that cannot be used.

    """
    asked.check(code, seed, official)
    config = asked.config(code, seed)
    device = resolve_device(config.device)
    run = Path(config.output_dir) / config.run_name
    run.mkdir(parents=True, exist_ok=True)
    _compile_alone(run)
    record = Record(run, asked.minutes)
    record.write()
    if record.trained:
        ended = "trained already"
    elif code == "official":
        assert official is not None
        ended = train_official(config, official, record, limit, device)
    else:
        ended = train_ours(config, record, limit, device)
    say(f"{code}, seed {seed}: {ended}")
    return record


def score_last(seed: int, asked: Asked, record: Record, device: torch.device) -> None:
    """Score the other samplers of fullstride's last network, beside which its single step stands."""
    config = asked.config("fullstride", seed)
    watch = Watch(config, record, 0.0, device)
    generator = load_generator(record.path.parent, config.device)
    for sampler in LAST:
        record.values["final"][name_of(sampler)] = watch.score(generator.model, sampler)
        record.write()


def _compile_alone(run: Path) -> None:
    """Compile into the run's own folder: what another run has compiled would make this one's start-up too short."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(run / "compiled" / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(run / "compiled" / "triton")


def run(code: str, seed: int, asked: Asked, limit: float, official: Path | None) -> bool:
    """`run_one`, then the other samplers' scores if there is time; returns whether the run is complete."""
    start = time.perf_counter()
    record = run_one(code, seed, asked, limit, official)
    if record.trained and code == "fullstride" and name_of(EULER) not in record.values["final"]:
        if time.perf_counter() - start > limit:
            say(f"{code}, seed {seed}: the same command scores the solver")
            return False
        score_last(seed, asked, record, resolve_device(asked.config(code, seed).device))
    return record.trained
