"""Blocks of the pages, their output, and the output that the pages show below them.

`python -m tests.pages.outputs PAGE ...` runs pages and writes below each block what it printed.
"""

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sybil import Example, Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from fullstride.measure.roofline import IMPOSSIBLE

READER = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])
SHOWN = re.compile(r"\n+```text\n(.*?)```", re.DOTALL)
# What may differ from one run of the same block to the next, and the word that stands for all of it.
VARIES = {
    r"b is (faster|slower):.*?\)\.|# pairs show no difference.*? one\.": "VERDICT",
    rf"\s*{re.escape(IMPOSSIBLE)}": "",
    r"\((arithmetic|memory)\)": "(BOUND)",
    r"\b(hidden|exposed)( in #% of steps)?": "WAITED",
    r"[TG]?(FLOP|B)/s": "RATE",
}


def skeleton(text: str) -> str:
    """The text with `#` for every number and one space for every gap, so that two runs print the same."""
    found = " ".join(re.sub(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#", text).split())
    for pattern, word in VARIES.items():
        found = re.sub(pattern, word, found)
    return found


def printed(example: Example) -> str:
    """Run a block and return its output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        example.evaluate()
    return out.getvalue()


def visible(example: Example) -> bool:
    """Return whether readers of the page see a block."""
    return example.document.text.startswith("```python", example.start)


def shown(example: Example) -> str:
    """Return the output that the page shows below a block; empty if none."""
    found = SHOWN.match(example.document.text, example.end) if visible(example) else None
    return found[1] if found else ""


def _written(page: Path) -> Iterator[str]:
    """The parts of the page, with what its blocks print now."""
    document, done = READER.parse(page), 0
    for example in document:
        out = printed(example)
        if visible(example):
            yield document.text[done : example.end]
            old = SHOWN.match(document.text, example.end)
            done = old.end() if old else example.end
            lines = "\n".join(line.rstrip() for line in out.strip("\n").splitlines())
            yield f"\n\n```text\n{lines}\n```" if lines else ""
    yield document.text[done:]


if __name__ == "__main__":
    for page in [Path(name).resolve() for name in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            page.write_text("".join(_written(page)))
