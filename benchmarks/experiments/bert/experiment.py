"""Masked language modelling on real text for a given time: learning progress, and the cost of calling the step."""

import json
import signal
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.bert.steps import overhead
from benchmarks.harness.budget import say
from benchmarks.harness.run_provenance import expect_here, expect_recipe, of_run
from benchmarks.harness.time_limit import Limit
from fullstride.bert.training.settings import TrainSettings, apply, full_key, settings_of
from fullstride.bert.training.trainer import Trainer
from fullstride.errors import ConfigError, one_of
from fullstride.process.signals import run_or_stop
from fullstride.runs.atomic_files import read_best_effort, replace_file
from fullstride.runs.folder import METRICS, SAME_COMMAND, read_metrics
from fullstride.settings.overrides import flat

OVERHEAD = "overhead.json"
# Settings that no number of a result depends on, or that follow from the minutes and the pace.
FREE = {
    "steps", "eval_every", "save_every", "keep", "log_every", "run_name", "output_dir", "resume", "overwrite",
    "evaluation.batch_size",
}  # fmt: skip
# Texts that are the same wherever they lie; a path of others says which they are.
SAME_ANYWHERE = {"gcide", "python_docs"}
NONE = Limit()
DECLARED: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("settings.toml").read_text())
MODELS: Mapping[str, list[str]] = DECLARED["models"]
SCALES: Mapping[str, Mapping[str, str]] = DECLARED["scales"]
EVALUATIONS = 10
# What tells the runs of an experiment apart, and how long they are: options of the command say it.
OWN = ("model.size", "seed", "steps", "output_dir", "run_name", "resume", "overwrite")
# Steps of a run before it is known how many fit; nothing that is timed depends on them.
NOMINAL = 100_000


def recipe_of(settings: TrainSettings) -> dict[str, Any]:
    """Return the settings that a run's numbers depend on, by dotted keys."""
    free = FREE | ({"data.path"} if settings.data.name in SAME_ANYWHERE else set())
    return {key: value for key, value in flat(asdict(settings)) if key not in free}


def read_begun(run: Path, settings: TrainSettings) -> dict[str, Any]:
    """Read the times and the number of steps of a run, which must have these settings.

    ConfigError if it was begun with other settings, naming all that differ, or its file is incomplete.
    """
    begun = read_best_effort(run / OVERHEAD)
    expect_recipe(begun, recipe_of(settings), run)
    return begun


@dataclass(frozen=True)
class BertRequest:
    """Request of one call of the experiment."""

    scale: str = "gpu"  # gpu, cpu or smoke
    models: tuple[str, ...] = ()  # sizes' names; the scale's own if none
    minutes: float = 20.0  # of training, for each
    seed: int = 0  # of weights, order and masks
    runs: Path = Path("runs/bert-experiment")  # the folder of runs
    overrides: tuple[str, ...] = ()  # of the settings

    def __post_init__(self) -> None:
        """Check the scale and the overrides, and take the scale's models; ConfigError for an unknown scale, or an
        override that is none or of what the command's options say.
        """
        one_of("--scale", self.scale, SCALES)
        apply(list(self.overrides), TrainSettings())
        if own := [key for override in self.overrides if (key := full_key(override)) in OWN]:
            raise ConfigError(
                f"{', '.join(own)}: set by --model, --seed, --minutes and --runs; use these options instead"
            )
        object.__setattr__(self, "models", self.models or tuple(MODELS[self.scale]))

    def settings(self, model: str, steps: int) -> TrainSettings:
        """Return the settings of a run of `steps` steps; ConfigError if a setting is invalid."""
        given = {full_key(override): override.partition("=")[2] for override in self.overrides}
        often = str(-(-steps // EVALUATIONS))
        own = {"steps": str(steps), "eval_every": often, "save_every": often}
        place = {
            "model": model,
            "seed": str(self.seed),
            "output_dir": str(self.runs / self.scale),
            "run_name": f"{model}-{self.seed}",
            "resume": "true",
        }
        usual = {full_key(key): value for key, value in {**DECLARED["settings"], **SCALES[self.scale]}.items()}
        merged = {**usual, **own, **given, **place}
        return settings_of([f"{key}={value}" for key, value in merged.items()])

    def run(self, model: str) -> Path:
        """Return the folder of a run."""
        return self.runs / self.scale / f"{model}-{self.seed}"


def device_of(settings: TrainSettings) -> str:
    """Return the device as results name it: cuda or cpu."""
    return "cuda" if settings.device == "gpu" else "cpu"


class LimitedTrainer(Trainer):
    """Trainer that stops itself at a time limit, as a signal would stop it."""

    limit = NONE

    def _after_step(self) -> None:
        if self.limit.left <= 0 and self.stop.signal is None:
            self.stop.signal = signal.SIGTERM
        super()._after_step()


def run(model: str, asked: BertRequest, limit: Limit = NONE) -> None:
    """Time the step, then train for as many steps as fit the minutes, or resume; do nothing if all are done.

    ConfigError if settings cannot work here, or differ from those that the run was begun with. Preempted or
    KeyboardInterrupt after saving, when the time is over or a stop signal came.
    """
    path, nominal = asked.run(model) / OVERHEAD, asked.settings(model, NOMINAL)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        timed = run_or_stop(lambda: overhead(model, nominal, asked.minutes), f"timing {model}'s step")
        replace_file(path, json.dumps(timed | {"recipe": recipe_of(nominal)} | of_run({}), indent=1) + "\n")
    begun = read_begun(path.parent, nominal)
    if begun["minutes"] != asked.minutes:
        raise ConfigError(
            f"--minutes {asked.minutes:g}: {path.parent} was begun with {begun['minutes']:g}; "
            "give that or another --runs"
        )
    settings = asked.settings(model, begun["steps"])
    if _is_finished(path.parent, settings):
        say(f"{model}: already trained")
        return
    expect_here([begun], device_of(settings))
    trainer = LimitedTrainer(settings, resume_advice=SAME_COMMAND)
    trainer.limit = limit
    if trainer.state.step < begun["steps"]:  # a later process may go on by other code
        replace_file(path, json.dumps(begun | of_run(begun), indent=1) + "\n")
    trainer.run_to_end()


def _is_finished(run: Path, settings: TrainSettings) -> bool:
    """Return whether a run's metrics cover all its steps and the final evaluation; its checkpoints may be deleted."""
    lines = read_metrics(run) if (run / METRICS).is_file() else []
    made = {line["step"] for line in lines if "evaluation" in line or not settings.eval_every}
    return settings.steps in made
