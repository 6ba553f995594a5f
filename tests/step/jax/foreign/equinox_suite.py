"""Equinox's own test files, with its `filter_jit` and with `cached_filter_jit` in its place, from a checkout.

    python -m tests.step.jax.foreign.equinox_suite ../equinox [test_jit.py ...]

Prints a table, and exits with 1 if a test that passes with the original fails with the replacement. Both run on the
checkout's own Equinox, with the pytest of this environment.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[4]
# The files whose tests call `filter_jit`.
FILES = re.compile(r"\bfilter_jit\b")


# A plugin of pytest: the checkout has a package `tests` of its own, so none of ours can be one. Equinox is imported
# last of all, as its configuration instruments it.
PLUGIN = """
import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure():
    import equinox
    from fullstride.step.jax import cached_filter_jit

    if {replaced}:
        equinox.filter_jit = cached_filter_jit
"""


def outcomes(checkout: Path, files: list[str], replaced: bool) -> dict[str, str]:
    """Run the files; return `passed`, `failed` or `skipped` by the test's name, and the file's name in front."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        (Path(folder) / "replaced_filter_jit.py").write_text(PLUGIN.format(replaced=replaced))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "replaced_filter_jit", f"--junitxml={report}"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((folder, str(ROOT)))}
        named = [f"tests/{file}" for file in files]
        done = subprocess.run([*command, *named], cwd=checkout, env=environment, capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(f"{checkout}: pytest did not run: {(done.stdout + done.stderr)[-2000:]}")
        return dict(map(_outcome, ElementTree.parse(report).iter("testcase")))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    name = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}"
    kinds = {child.tag for child in case}
    return name, "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def table(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the lines of a Markdown table by file, and those of the tests that the replacement alone fails."""
    files = sorted({name.partition("::")[0] for name in before})
    lines = ["| file | pass with `filter_jit` | of these with `cached_filter_jit` |", "|---|---:|---:|"]
    total = [0, 0]
    for file in files:
        passed = [name for name, kind in before.items() if name.startswith(f"{file}::") and kind == "passed"]
        counts = len(passed), sum(after.get(name) == "passed" for name in passed)
        total = [a + b for a, b in zip(total, counts, strict=True)]
        lines.append(f"| `{file}` | {counts[0]} | {counts[1]} |")
    lines.append(f"| all | {total[0]} | {total[1]} |")
    return lines + [f"fails with the replacement alone: {name}" for name in lost(before, after)]


def lost(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the tests that pass with the original and not with the replacement."""
    return [name for name, kind in before.items() if kind == "passed" and after.get(name) != "passed"]


def main(checkout: str, *files: str) -> int:
    """Run both, and print the table."""
    folder = Path(checkout)
    found = [path.name for path in sorted(folder.glob("tests/test_*.py")) if FILES.search(path.read_text())]
    if not found:
        raise SystemExit(f"{checkout}: no tests/test_*.py calls filter_jit; expected a checkout of Equinox")
    before, after = (outcomes(folder, list(files) or found, replaced) for replaced in (False, True))
    sys.stdout.write("\n".join(table(before, after)) + "\n")
    return int(bool(lost(before, after)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
