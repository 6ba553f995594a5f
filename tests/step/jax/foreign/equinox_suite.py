"""Equinox's own test files, with its `filter_jit` and with `cached_filter_jit` in its place, from a checkout.

    python -m tests.step.jax.foreign.equinox_suite ../equinox [test_jit.py ...]

Prints a table, a row as soon as a file has run with both: after a stop, name the files that are left. Exits with 1 if
a test that passes with the original fails with the replacement, or if pytest did not come to the end of a file. Both
run on the checkout's own Equinox, with the pytest of this environment.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[4]
# The files whose tests call `filter_jit`.
FILES = re.compile(r"\bfilter_jit\b")
# For one file with one of the two; `LIMIT=...` in the environment is another.
SECONDS = 3600.0

# A plugin of pytest: the checkout has a package `tests` of its own, so none of ours can be one. Equinox is imported
# last of all, as its configuration instruments it. Outcomes are written as they come: a process that dies has some.
PLUGIN = """
import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure():
    import equinox
    from fullstride.step.jax import cached_filter_jit

    if {replaced}:
        equinox.filter_jit = cached_filter_jit


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        with open({path!r}, "a") as file:
            file.write(f"{{report.nodeid}} {{report.outcome}}\\n")
"""


def outcomes(checkout: Path, file: str, replaced: bool) -> tuple[dict[str, str], str]:
    """Run a file; return `passed`, `failed` or `skipped` by the test's name, and why there may be more tests."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "outcomes.txt"
        found.touch()
        (Path(folder) / "replaced_filter_jit.py").write_text(PLUGIN.format(replaced=replaced, path=str(found)))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((folder, str(ROOT)))}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "replaced_filter_jit", f"tests/{file}"]
        seconds = float(os.environ.get("LIMIT", SECONDS))
        try:
            done = subprocess.run(
                command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            ended = f"stopped after {seconds:g} s"
        else:
            said = (done.stdout + done.stderr)[-2000:]
            ended = "" if done.returncode in (0, 1) else f"pytest exited with {done.returncode}: {said}"
        lines = (line.rpartition(" ") for line in found.read_text().splitlines())
        return {name: outcome for name, _, outcome in lines}, ended


def lost(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the tests that pass with the original and not with the replacement."""
    return [name for name, kind in before.items() if kind == "passed" and after.get(name) != "passed"]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201 # a command's output


def main(checkout: str, *files: str) -> int:
    """Run both, file by file, and print the table."""
    folder = Path(checkout)
    found = [path.name for path in sorted(folder.glob("tests/test_*.py")) if FILES.search(path.read_text())]
    if not found:
        raise SystemExit(f"{checkout}: no tests/test_*.py calls filter_jit; expected a checkout of Equinox")
    say("| file | tests | pass with `filter_jit` | of these with `cached_filter_jit` |\n|---|---:|---:|---:|")
    rows, remarks = [], []
    for file in files or found:
        (before, early), (after, late) = (outcomes(folder, file, replaced) for replaced in (False, True))
        passed, losses = list(before.values()).count("passed"), lost(before, after)
        rows.append((len(before), passed, passed - len(losses)))
        say(_row(f"`{file}`", *rows[-1]))
        remarks += [f"{file} with filter_jit: {early}"] * bool(early)
        remarks += [f"{file} with cached_filter_jit: {late}"] * bool(late)
        remarks += [f"fails with the replacement alone: {name} ({after.get(name, 'not run')})" for name in losses]
    say(_row("all", *map(sum, zip(*rows, strict=True))))
    say("\n".join(remarks))
    return int(bool(remarks))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
