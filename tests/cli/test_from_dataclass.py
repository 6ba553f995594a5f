from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from fullstride.cli.from_dataclass import command_from, sections_of
from fullstride.cli.help import App


@dataclass(frozen=True)
class Base:
    """Measure something."""

    heading = "Common"
    size: Annotated[int, typer.Option(min=1, help="How large.")] = 3


@dataclass(frozen=True)
class Options(Base):
    """Measure something else."""

    heading = "Own"
    names: Annotated[tuple[str, ...], typer.Option("--name", help="Which.")] = ("a",)
    place: Annotated[Path | None, "Where.", "FOLDER"] = None
    size: Annotated[int, typer.Option(min=1, help="How large.")] = 4
    hidden: int = 7


@pytest.fixture
def called():
    calls, app = [], App("A command.")
    for unique in (False, True):
        made = command_from(lambda options, words=("x",): calls.append(options), Options, unique=unique)
        app.command(f"unique-{unique}".lower(), sections=sections_of(Options))(made)
    return lambda *words: (CliRunner().invoke(app, words), calls)


def test_options_are_the_fields_with_their_defaults(called):
    assert called("unique-false")[1] == [Options()]
    result, calls = called("unique-false", "--size", "5", "--name", "b", "--name", "b", "--place", "/x")
    assert result.exit_code == 0, result.output
    assert calls[-1] == Options(size=5, names=("b", "b"), place=Path("/x"))
    assert called("unique-true", "--name", "b", "--name", "b")[1][-1] == Options(names=("b",))
    assert called("unique-true", "--size", "0")[0].exit_code == 2


def test_help_is_the_docstring_and_the_fields_under_their_headings(called):
    shown = called("unique-true", "--help")[0].stdout
    assert "Measure something else." in shown
    assert shown.index("Common:") < shown.index("--size") < shown.index("Own:") < shown.index("--name")
    assert "--place FOLDER Where." in " ".join(shown.split())
    assert "[default: 4; x>=1]" in shown
    assert "hidden" not in shown
