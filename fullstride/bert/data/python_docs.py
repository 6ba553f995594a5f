"""`data=python_docs`: the standard library's docstrings and the help topics of the Python that runs (PSF licence)."""

import ast
import hashlib
import importlib
import json
import re
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from fullstride.assets.fetch import cache_folder
from fullstride.bert.data.corpus import Corpus
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import note, write_best_effort

# Another one for another way to take texts out.
VERSION = 1
# Folders of other people's packages, and of tests, which document little.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def load() -> Corpus:
    """One entry for each docstring and each topic that has prose, in the order of the files.

    They differ a little from one version of Python to another.

    Raises:
        ConfigError: if the library's sources are missing.

    """
    root = Path(sysconfig.get_path("stdlib"))
    name = hashlib.sha256(json.dumps([VERSION, sys.version, str(root)]).encode()).hexdigest()[:24]
    kept = cache_folder() / "python_docs" / f"{name}.json"
    if (entries := _read(kept)) is None:
        texts = [*_topics(), *docstrings(root)]
        entries = list(dict.fromkeys("\n".join(found) for text in texts if (found := paragraphs(text))))
        if not entries:
            raise ConfigError(f"data=python_docs: no docstrings in {root}; use data=text_files data.path=FILES")
        write_best_effort(kept, json.dumps(entries))
    return Corpus("python_docs", tuple(entries))


def _read(kept: Path) -> list[str] | None:
    """Read the cached texts; None if there are none, or if they are damaged, which is noted."""
    if not kept.is_file():
        return None
    try:
        return json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        note(f"{kept}: damaged ({error}); creating it again")
        return None


def _topics() -> list[str]:
    try:
        return list(importlib.import_module("pydoc_data.topics").topics.values())
    except ImportError:
        note("this Python comes without its help topics; using its docstrings alone")
        return []


def docstrings(root: Path) -> Iterator[str]:
    """Every docstring below a folder, file by file."""
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts[:-1]):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):  # templates, and samples of what is no Python
            continue
        nodes = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
        yield from (text for node in nodes if (text := ast.get_docstring(node)))


# ``code``, `name`, :role:`name`, *emphasis*: the words stay.
ROLE = re.compile(r"(?::[a-z:]+:)?(`{1,2})[~!]?([^`]+)\1_{0,2}")
EMPHASIS = re.compile(r"(\*{1,2})(\w[^*\n]*?)\1")
# What begins a paragraph that is no prose: prompts, directives, tables, rules, comments.
NOT_PROSE = re.compile(r"(>>>|\.\.\.|\.\. |[+|=\-#~^\"'$<{\[(@]|\w+\(|\w+ *=)")
PROMPT = ">>>"
LETTERS, WORDS = 0.85, 5


def paragraphs(text: str) -> list[str]:
    """The paragraphs of prose in a docstring or a page of reStructuredText, each in one line."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        block = textwrap.dedent(block).strip()
        line = " ".join(EMPHASIS.sub(r"\2", ROLE.sub(r"\2", block)).split())
        letters = sum(c.isalpha() or c.isspace() for c in line)
        is_prose = len(line.split()) >= WORDS and letters >= LETTERS * len(line)
        if not NOT_PROSE.match(block) and PROMPT not in block and is_prose:
            found.append(line)
    return found
