"""Every command line of the pages exists, with its options and settings."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from benchmarks.cli.app import app as benchmarks
from fullstride.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CALL = re.compile(r"fullstride |torchrun .*-m (?:fullstride|benchmarks) |python -m benchmarks ")
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def _lines(text: str) -> list[list[str]]:
    """Arguments of each line of a block that calls fullstride, by hand or by a launcher."""
    found = []
    for kind, block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if kind in ("", "bash") and (called := CALL.match(line)):
                words = shlex.split(line[called.end() :], comments=True)
                found.append(["benchmarks", *words] if "benchmarks" in called[0] else words)
    return found


LINES = [(page, line) for page in PAGES for line in _lines(page.read_text())]


def _write_files(text: str, folder: Path) -> None:
    """Make the files of a package whose blocks begin with their names."""
    for _, block in BLOCK.findall(text):
        if named := re.match(r"# (my_package/\w+\.py)\n", block):
            (folder / named[1]).parent.mkdir(exist_ok=True)
            (folder / named[1]).write_text(block)


def _parsed(arguments: list[str]):
    """The command and its settings, as they would be called; a wrong one raises click's error."""
    command, rest, path = typer.main.get_command(app), arguments, []
    if arguments[0] == "benchmarks":
        command, rest = typer.main.get_command(benchmarks), arguments[1:]
    while commands := getattr(command, "commands", None):
        path.append(rest[0])
        command, rest = commands[rest[0]], rest[1:]
    return path, command.make_context(path[-1], list(rest)).params


@pytest.mark.parametrize(
    ("page", "line"), LINES, ids=lambda value: value.name if isinstance(value, Path) else "-".join(value)[:60]
)
def test_a_command_line_of_a_page_is_understood(page, line, tmp_path, monkeypatch):
    _write_files(page.read_text(), tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path, params = _parsed(line)
    if path == ["meanflow", "train"]:
        from fullstride.meanflow.config.overrides import compose, sweep

        (sweep if params["multirun"] else compose)(params["overrides"] or [])


def test_there_are_some_and_a_wrong_one_is_seen():
    assert len(LINES) > 30
    assert {line[0] for _, line in LINES} >= {"meanflow", "bert", "llm", "benchmarks", "doctor"}
    with pytest.raises(KeyError):
        _parsed(["meanflow", "trian"])
    with pytest.raises(Exception, match="--no-such-option"):
        _parsed(["doctor", "--no-such-option"])
