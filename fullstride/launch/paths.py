"""Paths that a command reads and writes in a container: whether they exist, and whether they persist."""

import json
import posixpath
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import PurePosixPath

from fullstride.errors import ConfigError
from fullstride.launch.container import WORK
from fullstride.launch.processes import sources
from fullstride.launch.words import BENCHMARKS, Words, value_of

# The option that sets an output path, the path, and a note if the option was not given.
Place = tuple[str, str, str]
# Settings that name files or folders, unless they are one of these names.
NAMED: dict[str, tuple[str, ...]] = {"data.path": (), "data.tokenizer": ("minilm",), "model.init": ()}


def check_inputs(words: Words, remedy: str) -> None:
    """Check that a command's relative input paths do not name files that exist only on this machine.

    Relative ones in `runs`, which is there, too, pass, and so does the name of a data set of Hugging Face.

    Args:
        words: words of the command.
        remedy: way to bring such a folder to the other machine, for the message.

    Raises:
        ConfigError: for a setting that names a path that does not exist there.

    """
    for key, names in NAMED.items():
        path = value_of(words, key) or ""
        if not path or path in names or (key == "data.path" and value_of(words, "data") == "hf_dataset"):
            continue
        if not path.startswith("/") and posixpath.normpath(path).split("/")[0] != "runs":
            raise ConfigError(f"{key}={path}: a path of this machine does not exist there; {remedy}")


def check_output(words: Words, kept: list[str]) -> None:
    """Check that a command's output survives its container.

    Args:
        words: words of the command; its relative paths start at the folder in which commands run.
        kept: absolute folders that persist; the first contains `runs`.

    Raises:
        ConfigError: for an output_dir, an option or an option's default that lies anywhere else.

    """
    places = _of_benchmarks(tuple(words)) if words[0] == BENCHMARKS else _of_command(words)
    for told, path, note in places:
        place = PurePosixPath(posixpath.normpath(posixpath.join(WORK, path)))
        if any(place.is_relative_to(folder) for folder in kept):
            continue
        instead = f"give {told}runs/{place.name}" if told != "output_dir=" else f"leave it out (it is {kept[0]})"
        raise ConfigError(
            f"{told}{path}{note}: it would end with the container; {instead} or name a folder in one that stays: "
            f"{', '.join(kept)}"
        )


def _of_command(words: Words) -> Iterator[Place]:
    if (given := value_of(words, "output_dir")) is not None:
        yield "output_dir=", given, ""
    if words[:2] == ["bert", "export"] and len(words) > 3:
        yield "", words[3], ""
    for option in ("--out", "--profile"):
        # In one word or two.
        apart = [part for word in words for part in (word.split("=", 1) if word.startswith(f"{option}=") else [word])]
        if given := [after for word, after in pairwise(apart) if word == option]:
            yield f"{option} ", given[-1], ""  # the last counts, as it does for the command


@cache
def _of_benchmarks(words: tuple[str, ...]) -> list[Place]:
    """Ask the benchmarks for their places in a process of their own: the library never imports them.

    Raises:
        ConfigError: without a clone, or with the benchmarks' message.

    """
    root = sources(list(words))[BENCHMARKS].parent
    command = [sys.executable, "-m", BENCHMARKS, "outputs", *words[1:]]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"launch: {' '.join(words)}: {' '.join(done.stderr.split())}")
    return [(told, path, note) for told, path, note in json.loads(done.stdout)]
