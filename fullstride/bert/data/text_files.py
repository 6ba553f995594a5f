"""`data=text_files`: one's own texts in UTF-8."""

import glob
import os
import re
from pathlib import Path

from fullstride.bert.data.corpus import Corpus
from fullstride.errors import ConfigError, one_of

# What lies between two entries; None for nothing: a file is one entry.
SEPARATORS = {"file": None, "blank_line": re.compile(r"\n\s*\n"), "line": re.compile(r"\n")}


def load(path: str, separator: str = "file") -> Corpus:
    """The texts of files.

    Args:
        path: files, folders (their `*.txt`, at any depth) and patterns such as `books/*.md`, separated by commas.
        separator: boundary of entries: `file`, `blank_line` or `line`.

    Raises:
        ConfigError: for a path that names nothing, a file that cannot be read or is not UTF-8, or no text at all.

    """
    one_of("data.separator", separator, SEPARATORS)
    between = SEPARATORS[separator]
    texts = [_read(file) for file in files(path)]
    parts = texts if between is None else [part for text in texts for part in between.split(text)]
    entries = tuple(part.strip() for part in parts if part.strip())
    if not entries:
        raise ConfigError(f"data.path={path}: no text in {len(texts)} files")
    return Corpus("text_files", entries)


def files(path: str) -> list[Path]:
    """The files that a setting names, each once, in the order of their names within each part of it."""
    given = [path] if os.path.exists(os.path.expanduser(path)) else path.split(",")  # a name may hold commas
    parts = [part.strip() for part in given if part.strip()]
    if not parts:
        raise ConfigError("data=text_files: expected data.path=FILES, folders or patterns, separated by commas")
    return list(dict.fromkeys(file for part in parts for file in _files(part)))


def _files(part: str) -> list[Path]:
    whole = Path(part).expanduser()
    if whole.is_file():
        return [whole]
    found = whole.rglob("*.txt") if whole.is_dir() else map(Path, glob.glob(str(whole), recursive=True))
    if files := sorted(file for file in found if file.is_file()):
        return files
    what = "no *.txt in this folder" if whole.is_dir() else "no such file or folder, and no file of this pattern"
    raise ConfigError(f"data.path={part}: {what}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # what editors put in front is no text
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}); convert it, such as with "
            "iconv -t utf-8, or leave it out"
        ) from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
