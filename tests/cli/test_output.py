import subprocess
import sys

import pytest

# Work whose reader leaves after the first line: it is done all the same.
WORK = """
import sys
from pathlib import Path
from rich.console import Console
from fullstride.cli import app as cli

def work():
    print("first", flush=True)
    sys.stdin.read()  # until the reader has left
    for _ in range(3000):
        print("more")
        Console().print("[bold]more[/bold]")
        print("more", file=sys.stderr)
    sys.stdout.flush()
    Path("done").write_text("whole")
    raise SystemExit(3)

cli.app = work
cli.main()
"""


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_work_goes_on_when_nobody_reads_what_it_prints(options, tmp_path):
    command = [sys.executable, *options, "-c", WORK]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
        process.stdin.close()
        assert process.wait(timeout=60) == 3
    assert (tmp_path / "done").read_text() == "whole"


@pytest.mark.parametrize("line", ["doctor", "meanflow presets", "meanflow train --help", "--version"])
def test_a_command_whose_reader_has_left_ends_well_and_says_nothing_of_it(line):
    piped = f'"{sys.executable}" -m fullstride {line} | true'
    done = subprocess.run(["bash", "-o", "pipefail", "-c", piped], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr in ("", "\nThe settings of one: fullstride meanflow presets NAME\n")


def test_lines_come_whole_and_in_order_to_a_reader_who_stays():
    code = "from fullstride.cli import app as cli; cli.app = lambda: [print(i) for i in range(9999)]; cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(i) for i in range(9999)]


def test_a_closed_output_ends_nothing():
    done = subprocess.run(["bash", "-c", f'"{sys.executable}" -m fullstride --version >&- 2>&-'])
    assert done.returncode == 0


@pytest.mark.parametrize("line", ["--version", "meanflow --help", "meanflow keys"])
def test_a_full_disk_is_one_line_and_a_failure(line):
    with open("/dev/full", "wb") as full:
        words = [sys.executable, "-m", "fullstride", *line.split()]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")
