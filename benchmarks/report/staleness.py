"""Staleness of results: changes of the code under test, or of the measuring code, since the measurement."""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from benchmarks.harness.code_digest import digest_of
from benchmarks.harness.environment import FOLDER
from benchmarks.report.frame import Source

ROOT = Path(__file__).parents[2]
CURRENT, HARNESS, CHANGED, UNKNOWN = "current", "harness changed", "code under test changed", "not known"
# New paths of moved files, by the paths in older results.
MOVES: dict[str, str] = json.loads(Path(__file__).with_name("moves.json").read_text())
CASES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("cases.toml").read_text())
# Commands by the names that they had in older results. A race that is told its codes gathers finished runs unasked.
OLD = re.compile(r"(?P<launcher>torchrun .*-m )?fullstride (?:bench|experiment) ")
KEPT = "# what is finished in its folder of runs is not run again, so remove that, or give other --runs: "


class State(NamedTuple):
    """How a result stands to the present code: current, code under test changed, not known where nothing tells, or
    harness changed: what measures, launches or surrounds that code.
    """

    name: str
    why: str  # the files that changed, or what was found


def covers(paths: Iterable[str], file: str) -> bool:
    """Return whether a file matches one of the patterns or lies below one."""
    return any(fnmatch(file, path) or file.startswith(f"{path}/") for path in paths)


def code_of(source: Source) -> list[str]:
    """Return the code under test of a result: files and folders relative to the root of a clone."""
    return CASES.get(source.case, {}).get("code", [])


def state(source: Source, root: Path = ROOT, moves: Mapping[str, str] = MOVES) -> State:
    """Return the state of a result from its digests of all files that were loaded during the measurement."""
    recorded, code = source.recorded("code", dict), code_of(source)
    if not recorded or not code:
        return State(UNKNOWN, "no digests of its code were recorded" if code else "no case says which code it is of")
    here = {moves.get(file, file): kept for file, kept in recorded.items()}
    changed = [file for file, kept in here.items() if digest_of(root / file) != kept]
    own = [file for file in here if covers(code, file)]
    for name, files in ((CHANGED, [file for file in changed if file in own]), (HARNESS, changed)):
        if files:
            return State(name, PurePosixPath(files[0]).name + f" and {len(files) - 1} more" * (len(files) > 1))
    return State(CURRENT, "all that was loaded is what it was") if own else State(UNKNOWN, "its code is not recorded")


def script(found: Iterable[tuple[Source, State]]) -> str:
    """Return a shell script with a comment per file and, once below it, the command that measures it again.

    A command that needs manual preparation is commented out.
    """
    files: dict[str, list[str]] = {}
    for source, its in found:
        told = f"# {source.name} ({source.machine}, {source.moment[:10]}): {its.name}: {its.why}"
        files.setdefault(_command(source), []).append(told)
    ordered = sorted(files.items(), key=lambda item: not item[0])
    return "\n".join("\n".join((*names, command or "# its command was not recorded")) for command, names in ordered)


def command_of(source: Source) -> str:
    """Return the command that measured a result, as it is called now; empty if none was recorded."""
    command = source.recorded("command", str) or ""
    return OLD.sub(lambda found: f"{found['launcher'] or 'python -m '}benchmarks ", command)


def _command(source: Source) -> str:
    command = command_of(source)
    if "torchrun --nnodes=" in command:
        return f"# start it on every node, with a rendezvous: {command}"
    if source.kind == "experiment" and command:
        race = f" --gpus N,N --official {FOLDER}py-meanflow" if "time-to-quality" in source.case else ""
        return KEPT + command.replace(" --collect", race)
    return f"# put folders for {FOLDER}: {command}" if FOLDER in command else command
