import shlex
import sys
from pathlib import Path

import pytest

from fullstride.runs.next_steps import command, program, show_next_steps


def test_names_are_printed_whole_and_their_explanations_aligned(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    long = Path("runs") / ("a" * 90)
    show_next_steps({long: "pictures", Path("b[red]"): "numbers"}, {"fullstride one": "first", "two": "second"})
    assert capsys.readouterr().out.splitlines() == [
        f"  {long}  pictures",
        f"  {'b[red]':95}  numbers",
        "next:",
        "  fullstride one  # first",
        "  two             # second",
    ]


def test_a_command_is_what_a_shell_takes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])
    words = ["meanflow", "sample", "runs/it's [one] run"]
    assert shlex.split(command(*words)) == ["fullstride", *words]


@pytest.mark.parametrize("on_path", [True, False])
def test_the_program_is_named_as_it_can_be_started_again(tmp_path, monkeypatch, on_path):
    script = tmp_path / "bin" / "fullstride"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent) if on_path else "/nowhere")
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert program() == ("fullstride" if on_path else str(script))
    monkeypatch.setattr(sys, "argv", ["/x/fullstride/__main__.py"])
    monkeypatch.setattr(sys, "orig_argv", ["/some where/python", "-m", "fullstride"])
    assert program() == "'/some where/python' -m fullstride"
