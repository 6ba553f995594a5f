"""Files of a model's folder as Hugging Face lays it out: JSON objects, and weights in one file or several."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from fullstride.errors import ConfigError, shortened

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
# Characters of a file's name; Linux takes no longer ones.
MOST_NAME = 255
# Of an error: characters of a name, and names of missing files.
MOST_SHOWN, MOST_LISTED = 80, 5


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if there is no such file.

    Raises:
        ConfigError: if it is anything else.

    """
    try:
        value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a model: those of the index, `model.safetensors`, or all; empty for none.

    Raises:
        ConfigError: for an index that is damaged, leaves the folder, or names a file that is not there.

    """
    single, index = folder / WEIGHTS, folder / INDEX
    if not index.is_file():
        return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{index}: weight_map: expected an object with a file's name for each tensor")
    files = [_within(index, name) for name in dict.fromkeys(names.values())]
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - MOST_LISTED} more" if len(missing) > MOST_LISTED else ""
        named = ", ".join(missing[:MOST_LISTED]) + more
        raise ConfigError(f"{folder}: {INDEX} names {named}, which the folder does not have")
    return files


def _within(index: Path, name: str) -> Path:
    """A file of this name in the index's folder; it may be a link, as in Hugging Face's cache."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or len(name) > MOST_NAME:
        shown = shortened(repr(name), MOST_SHOWN)
        raise ConfigError(f"{index}: weight_map names {shown}: expected a file in its folder")
    return index.parent / name
