"""Request of a comparison of two codes, and the recipe that both follow."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.meanflow.jobs import name_of
from benchmarks.experiments.meanflow.official import CHECKPOINT
from benchmarks.experiments.meanflow.official_code import check_device, check_network, check_settings
from benchmarks.experiments.meanflow.record import RECORD, Record, best
from benchmarks.experiments.meanflow.spec import Sampler, by_key, composed, merged
from benchmarks.experiments.meanflow.watch import MOMENTS
from fullstride.device.select import resolve_device
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.checkpoints.folder import checkpoints
from fullstride.meanflow.config.datasets import row_of
from fullstride.meanflow.config.recipes import as_read
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.evaluation.preflight import check_generating
from fullstride.meanflow.training.state import FREE_KEYS
from fullstride.runs.atomic_files import read_best_effort
from fullstride.settings.overrides import flat

CODES = ("fullstride", "official")
# Of a rate that falls over the time: fullstride once more, given this share of it.
SHORT, SHARE = "fullstride-short", MOMENTS[0]
EULER: Sampler = ("euler", 50)
# Further samplers for fullstride's last network.
LAST: tuple[Sampler, ...] = (("meanflow", 2), EULER)
DECLARED: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("race.toml").read_text())
SCALES: Mapping[str, Mapping[str, str]] = DECLARED["scales"]
VARIANTS: Mapping[str, Mapping[str, str]] = DECLARED["variants"]
# Settings that numbers of a run do not depend on: of those that a run may go on with otherwise, what takes other time
# does change what is reached within it.
TIMED = {"guard.check_step", "guard.check_tangents", "backend", "channels_last", "model.recompute", "distributed"}
TIMED |= {"transfers", "data.workers"}
FREE = {*FREE_KEYS, "seed", *(f"evaluation.{key}" for key in ("backend", "batch_size", "inception_weights"))}
FREE -= {"evaluation", *TIMED}


@dataclass(frozen=True)
class RaceRequest:
    """Request of one call of the comparison."""

    scale: str = "gpu"  # gpu or smoke
    minutes: float = 10.0  # of training, start-up and scoring apart, of which `SHORT` is given a share
    runs: Path = Path("runs/time-to-quality")  # the folder of runs
    overrides: tuple[str, ...] = ()  # of the recipe, for both codes

    def config(self, code: str, seed: int) -> TrainConfig:
        """Return the configuration of a run.

        One of `VARIANTS` is fullstride's configuration with these changes. ConfigError if a setting is invalid,
        or the official code does not have the network.
        """
        one_of("--scale", self.scale, SCALES)
        one_of("--code", code, self.codes)
        settings = self._settings | dict(VARIANTS.get(code, {}))
        config = composed(tuple(f"{key}={value}" for key, value in settings.items()))
        config.seed, config.resume = seed, True
        config.run_name, config.output_dir = f"{code}-{seed}", str(self.folder)
        check_network(config)
        return config

    @property
    def _settings(self) -> dict[str, str]:
        given = by_key(self.overrides)
        return {**as_read(merged(["recipe", DECLARED["settings"], SCALES[self.scale]]), given), **given}

    @property
    def decays(self) -> bool:
        """Return whether the learning rate decays, to zero at the end of each training's own time."""
        return self._settings.get("optimizer.decay") == "cosine"

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes that have runs.

        If the rate decays, quality midway differs from that of a shorter training, which is therefore a separate run.
        """
        return (*CODES, *VARIANTS, *((SHORT,) if self.decays else ()))

    def check(self, code: str, seed: int, official: Path | None) -> None:
        """See that a run can be, before anything begins; ConfigError for settings, a device or a checkout that cannot
        be used.
        """
        config = self.config(code, seed)
        check_settings(self.config("official", 0), RaceRequest(self.scale).config("official", 0))
        device = resolve_device(config.device)
        check_generating(config.evaluation, device)
        if code != "official":
            return
        if official is None:
            raise ConfigError(
                "--code official: expected --official PATH, a checkout of github.com/Gsunshine/py-meanflow"
            )
        check_device(official, device.type)

    def recipe(self, code: str) -> dict[str, Any]:
        """Return the settings that a code's numbers depend on, by dotted keys; a run resumes only with equal ones."""
        config = self.config(code, 0)
        free = FREE - ({"data.path"} if row_of(config.data.name).folder else set())  # others are the same anywhere
        values = flat(json.loads(json.dumps(asdict(config))))
        return {key: value for key, value in values if not {key, key.partition(".")[0]} & free}

    @property
    def folder(self) -> Path:
        """Folder of the runs at this scale."""
        return self.runs / self.scale

    def record(self, code: str, seed: int) -> Record:
        """Return the record of a run, existing or new; ConfigError if the run was begun with other settings."""
        minutes = SHARE * self.minutes if code == SHORT else self.minutes
        return Record(self.folder / f"{code}-{seed}", minutes, self.recipe(code))

    def begins_anew(self, code: str, seed: int) -> bool:
        """Return whether a run has no checkpoint to resume from."""
        run = self.folder / f"{code}-{seed}"
        return not (checkpoints(run) or (run / CHECKPOINT).is_file())

    def is_complete(self, code: str, seed: int) -> bool:
        """Return whether a run has nothing left to do."""
        record = self.record(code, seed)
        return record.trained and (code == "official" or all(name_of(last) in record.values["final"] for last in LAST))

    def begun(self) -> list[dict[str, Any]]:
        """Return the records of both codes' runs so far, of every seed that has one."""
        paths = sorted(path for code in self.codes for path in self.folder.glob(f"{code}-[0-9]*/{RECORD}"))
        return [best(read_best_effort(path)) for path in paths]

    def start_of(self, code: str) -> float:
        """Return the longest start of a code's existing runs in seconds; 0 if there is none."""
        paths = self.folder.glob(f"{code}-[0-9]*/{RECORD}")
        return max((best(read_best_effort(path))["startup"] or 0.0 for path in paths), default=0.0)
