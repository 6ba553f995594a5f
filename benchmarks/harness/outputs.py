"""Files and folders that a command of the benchmarks writes to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.result_paths import EXPERIMENTS, foreign, narrower, results_folder
from fullstride.launch.paths import Place


def outputs(app: Any, words: Sequence[str]) -> list[Place]:
    """List what a command writes to: options that it gives, and --out's default unless that lies among its runs.

    Args:
        app: the group of all commands.
        words: the command; what is wrong about it is refused by the command itself.

    """
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
