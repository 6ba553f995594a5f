"""Digests of the measured code, which comments, docstrings, blank lines and moves do not change."""

import ast
import hashlib
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import fullstride
from fullstride.extras import OWN

PACKAGE = Path(fullstride.__file__).parent
# Suffixes of code other than Python.
KERNELS = (".cu", ".cuh")
# A comment, or a text, in which there is none.
C_TEXT = re.compile(r"""(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])')|//[^\n]*|/\*.*?\*/""", re.DOTALL)
DIGITS = 12
Span = tuple[tuple[int, int], tuple[int, int]]  # (line from 1, column) of the start and behind the end


def digest(text: str, suffix: str) -> str:
    """Return the digest of a file's code; of a text that is neither Python nor C++, of every line that is not blank."""
    if suffix == ".py":
        text = _without(text, [*_in_tree(text), *_comments(text)])
    elif suffix in KERNELS:
        text = C_TEXT.sub(lambda found: found["text"] or "", text)
    lines = (line.rstrip() for line in text.splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:DIGITS]


def _in_tree(text: str) -> Iterator[Span]:
    """Yield docstrings, and imports of this project's own modules."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                yield _span(first)
        elif isinstance(node, ast.Import | ast.ImportFrom) and _is_own(node):
            yield _span(node)


def _span(node: ast.stmt) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def _is_own(node: ast.Import | ast.ImportFrom) -> bool:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return all(name.split(".")[0] in OWN for name in names)


def _comments(text: str) -> Iterator[Span]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                # Columns of tokens count characters, those of the tree bytes.
                yield tuple((row, len(token.line[:column].encode())) for row, column in (token.start, token.end))  # pyright: ignore[reportReturnType]
    except (tokenize.TokenError, SyntaxError):
        return


def _without(text: str, spans: list[Span]) -> str:
    """Return the text without those pieces."""
    # As Python counts them: a form feed, or U+2028 in a string, ends no line.
    lines = [line.encode() for line in text.split("\n")]
    for (row, column), (last, end) in sorted(spans, reverse=True):
        rest = lines[last - 1][end:]
        lines[row - 1 : last] = [lines[row - 1][:column] + rest]
    return "\n".join(line.decode() for line in lines)


def digest_of(path: Path) -> str | None:
    """Return the digest of a file, or None if it does not exist."""
    return _kept(path, path.stat().st_mtime_ns) if path.is_file() else None


@cache
def _kept(path: Path, changed: int) -> str:
    """Return the digest of a file at its time of change; a process that writes many results reads each file once."""
    return digest(path.read_text(encoding="utf-8"), path.suffix)


def joined(others: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Join the digests of files that processes have loaded; if they differ, keep one unlike the current file's.

    A result trained by older code and gathered now is thus known to be of older code.
    """
    found = loaded()
    for file, kept in (item for other in others for item in other.items()):
        if file not in found or kept != digest_of(PACKAGE.parent / file):
            found[file] = kept
    return found


def loaded() -> dict[str, str]:
    """Return digests of the project's loaded files, declarations beside them and all kernels' sources, by path."""
    # Runs ask again and again, beside thousands of modules of others: by their text, which is quick.
    own = {str(file) for m in list(sys.modules.values()) if (file := getattr(m, "__file__", None))}
    root = PACKAGE.parent
    packages = tuple(f"{root / name}{os.sep}" for name in OWN)
    files = [Path(file) for file in own if file.startswith(packages) and file.endswith(".py")]
    declared = [file for folder in {file.parent for file in files} for file in folder.glob("*.toml")]
    every = sorted([*files, *declared, *_kernels()])
    return {str(file.relative_to(root)): found for file in every if (found := digest_of(file))}


@cache
def _kernels() -> tuple[Path, ...]:
    return tuple(file for kind in KERNELS for file in PACKAGE.rglob(f"*{kind}"))
