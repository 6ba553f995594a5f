"""Provenance of experiments' runs: machine and settings, recorded by each run so that others can gather them."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness.code_digest import joined
from benchmarks.harness.environment import environment, machine_slug
from fullstride.errors import ConfigError

Environment = dict[str, Any]


def of_run(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's updated record of where and by which code it was made, including this process.

    It has `code`, digests of files, and `environments`, one for each process that worked on the run by another
    machine, commit or version than the one before.
    """
    here, known = _here(), list(kept.get("environments", []))
    if known and here == {name: value for name, value in known[-1].items() if name != "date"}:
        known.pop()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"code": joined([kept.get("code", {})]), "environments": [*known, here | {"date": now}]}


def expect_here(runs: Iterable[Mapping[str, Any]], device: str) -> None:
    """See, before this process adds to runs, that they were made by machines as this one; ConfigError if they were not:
    a result is of one kind of machine.
    """
    if known := _all(runs):
        _one_kind([*known, _here()], device)


def expect_recipe(values: Mapping[str, Any], recipe: Mapping[str, Any], run: Path) -> None:
    """See that a run was made with these settings; those that only one of the two knows are of other code; ConfigError
    if one differs, naming all.
    """
    known = values.get("recipe", {})
    if other := [f"{key}={known[key]}" for key in known.keys() & recipe.keys() if known[key] != recipe[key]]:
        raise ConfigError(f"{run}: was begun with {' '.join(sorted(other))}; give the same settings or another --runs")


def of_runs(runs: Iterable[Mapping[str, Any]], device: str) -> Environment:
    """Return the environment of a result gathered from runs: theirs, or this process's if none recorded one.

    Differing versions are listed together, as are commits under `commits`; the rest is that of the latest run.

    ConfigError if the runs come from different machines, or some do not record theirs.
    """
    runs = list(runs)
    gathering = environment(run.get("code", {}) for run in runs)
    silent = sum("environments" not in run for run in runs)
    if silent == len(runs):
        return gathering
    if silent:
        raise ConfigError(
            f"{silent} of {len(runs)} runs do not record their machine, expected all or none; delete their folders "
            "and run them again"
        )
    known = sorted(_all(runs), key=lambda found: found["date"])
    _one_kind(known, device)
    names = dict.fromkeys(name for found in known for name in found["versions"])
    versions = {name: ", ".join(_distinct(found["versions"].get(name) for found in known)) for name in names}
    found = gathering | known[-1] | {"versions": versions}
    # With a + where there were changes beside it.
    commits = _distinct(f"{e['commit'][:7]}{'+' * bool(e['dirty'])}" if e["commit"] else "unknown" for e in known)
    return found | ({"commits": commits} if len(commits) > 1 else {})


def _all(runs: Iterable[Mapping[str, Any]]) -> list[Environment]:
    return [found for run in runs for found in run.get("environments", [])]


def _one_kind(known: Iterable[Environment], device: str) -> None:
    machines = sorted({machine_slug(device, found) for found in known})
    if len(machines) > 1:
        raise ConfigError(
            f"the runs come from different machines, {' and '.join(machines)}, expected one kind; "
            "give --runs a folder with the runs of a single kind"
        )


def _distinct(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))


@cache
def _here() -> Environment:
    """Return this process's environment without a date, cached because collecting it takes time.

    It has no command either, because a result names the command that gathered it.
    """
    return {name: value for name, value in environment().items() if name not in ("date", "command", "code")}
