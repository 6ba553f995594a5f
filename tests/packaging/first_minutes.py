"""Write docs/tutorials/first-minutes.md: the timed output of the README's first commands in a fresh clone.

Run it by hand before a release, on a machine that does nothing else: `python -m tests.packaging.first_minutes`.
Packages come from the public index alone, whatever the machine's settings of pip are. `CPU=1` is passed on to make.
"""

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "first-minutes.md"
COMMANDS = [
    f"make demo{' CPU=1' if os.environ.get('CPU') else ''}",
    "source .venv/bin/activate",
    "fullstride doctor",
    "fullstride meanflow sample runs/demo --num 16",
    "fullstride meanflow presets",
]
PIP = re.compile(
    r"( *(Collecting|Obtaining|Processing|Downloading|Using cached|Preparing|Getting|Checking|Installing build)|"
    r" *(━|Attempting|Found existing|Uninstalling|Successfully)|"
    r"Requirement already|Looking in|Installing collected|Building|Created|Stored|WARNING: )"
)
# Of this machine, not of the public index.
SETTINGS = "PYTHONPATH", "PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"
HEAD = """# The first five minutes

What the first commands print in a fresh clone, with minutes and seconds since the first one was entered, on a machine
with {cores} CPU cores and no GPU. Written by `python -m tests.packaging.first_minutes`.

"""


def _lines(command: str, clone: Path, start: float) -> Iterator[tuple[float, str]]:
    """Yield each line that a command prints, with its time."""
    script = f"[ ! -e .venv/bin/activate ] || . .venv/bin/activate; {command}"
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environment |= {"COLUMNS": "100", "PYTHONUNBUFFERED": "1", "PIP_CONFIG_FILE": os.devnull}
    process = subprocess.Popen(
        ["bash", "-c", script], cwd=clone, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    for line in process.stdout:
        yield time.perf_counter() - start, line.rstrip().replace(str(clone), ".")
    if process.wait():
        raise SystemExit(f"{command} ended with {process.returncode}")


def _shown(lines: Iterator[tuple[float, str]]) -> Iterator[str]:
    """The lines with their times; neighbouring lines of pip as one."""
    for is_pip, group in groupby(lines, key=lambda line: bool(PIP.match(line[1]))):
        found = list(group)
        if is_pip and len(found) > 1:
            found = [(found[-1][0], f"  ... {len(found)} lines of pip")]
        for seconds, line in found:
            yield f"{int(seconds) // 60:2d}:{int(seconds) % 60:02d}  {line}".rstrip()


def main() -> None:
    """Run the commands and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "fullstride"
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        start, parts = time.perf_counter(), []
        for command in COMMANDS:
            parts.append("\n".join([f"$ {command}", *_shown(_lines(command, clone, start))]))
    text = HEAD.format(cores=os.cpu_count()) + "```text\n" + "\n\n".join(parts) + "\n```\n"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
