"""Default folders of results, and the files and folders that a command writes to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullstride.launch.paths import Place

RESULTS = Path("benchmarks/results")
# Settings with which a result is still the experiment's own: where the same data lie.
OWN = {"bert": ("data.path",), "time-to-quality": ("data.path",)}
# Of the race where its rate falls, whose result has a name of its own.
FALLING = ("optimizer.decay", "ema.decays")
# The commands of experiments, by name and by their phases' numbers.
PHASES = {
    "overfit": "phase2",
    "sanity": "phase3",
    "ablations": "phase4",
    "objectives": "phase5",
    "weightings": "phase6",
    "newer": "phase7",
}
EXPERIMENTS = (*PHASES, *PHASES.values(), "time-to-quality", "bert")
SEEDS = (0, 1, 2)
SEEDS_OF = {"bert": (0,)}
MINUTES_OF = {"bert": 20.0, "time-to-quality": 10.0}


def foreign(experiment: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides, such as `epochs=2`, that make a result differ from the experiment's own."""
    own = OWN.get(experiment, ())
    if experiment == "time-to-quality" and dict(each.split("=", 1) for each in overrides).get(FALLING[0]) == "cosine":
        own += FALLING
    return [override for override in overrides if override.partition("=")[0] not in own]


def narrower(
    experiment: str, *, seeds: Sequence[int] = (), minutes: float | None = None, models: Sequence[str] = ()
) -> list[str]:
    """Return the options that make a result smaller than the experiment's own, or different.

    None of the seeds, minutes or models means the experiment's own.
    """
    lacking = seeds and not set(SEEDS_OF.get(experiment, SEEDS)) <= set(seeds)
    other = minutes is not None and minutes != MINUTES_OF.get(experiment)
    return [
        *(f"--seed {seed}" for seed in seeds if lacking),
        *([f"--minutes {minutes:g}"] if other else []),
        *(f"--model {model}" for model in models),
    ]


def results_folder(out: Path | None, scale: str, runs: Path, overrides: Sequence[str] = ()) -> Path:
    """Return the folder of an experiment's result.

    Results of smoke tests are no evidence, and those of other settings would replace an experiment's own: both stay out
    of the folder of results.

    `overrides` are settings and options that differ from the experiment's own; see `foreign` and `narrower`.
    """
    return out or (runs / "results" if scale == "smoke" or overrides else RESULTS)


def outputs(app: Any, words: Sequence[str]) -> list[Place]:
    """List the paths that a command writes to: given options, and --out's default unless it is among its runs."""
    command, rest = app, list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    if hasattr(command, "commands"):  # a group alone, or no command at all
        return []
    context = command.make_context(command.name, rest, resilient_parsing=True)
    # The --runs of others are what they read, or a number.
    options = ("out", "profile", *(["runs"] if words[0] in EXPERIMENTS else []))
    given = [name for name in options if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    found = [(f"--{name} ", str(context.params[name]), "") for name in given]
    default = _of_experiment(words[0], context.params) if words[0] in EXPERIMENTS else context.params.get("out")
    return found if "out" in given or default is None else [*found, ("--out ", str(default), " (the default)")]


def _of_experiment(name: str, params: Mapping[str, Any]) -> Path | None:
    if params.get("code") and not params["gpus"]:
        return None  # one training of the race, which has no result of its own
    seeds = params["seeds"] if "seeds" in params else params["seed"]
    seeds = [seeds] if isinstance(seeds, int) else seeds
    less = narrower(name, seeds=seeds or (), minutes=params.get("minutes"), models=params.get("model") or ())
    return results_folder(None, params["scale"], params["runs"], [*foreign(name, params["overrides"]), *less])
