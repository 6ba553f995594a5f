"""Where a command writes in a container, and whether that stays."""

import posixpath
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath

from fullstride.errors import ConfigError
from fullstride.launch.container import WORK
from fullstride.launch.processes import sources
from fullstride.launch.words import BENCHMARKS, Words, value_of


def check_output(words: Words, kept: list[str]) -> None:
    """Check that what a command makes lands where it outlives its container.

    Args:
        words: the command; relative paths in it are of the folder where commands run.
        kept: absolute folders that stay; the first is where `runs` lies.

    Raises:
        ConfigError: for an output_dir, an option or an option's default that lies anywhere else.

    """
    for told, path, note in _places(words):
        place = PurePosixPath(posixpath.normpath(posixpath.join(WORK, path)))
        if any(place.is_relative_to(folder) for folder in kept):
            continue
        instead = f"give {told}runs/{place.name}" if told != "output_dir=" else f"leave it out (it is {kept[0]})"
        raise ConfigError(
            f"{told}{path}{note}: it would end with the container; {instead} or name a folder in one that stays: "
            f"{', '.join(kept)}"
        )


def _places(words: Words) -> Iterator[tuple[str, str, str]]:
    """What a command writes to: how it is told, the path, and a note where it was not told."""
    if (given := value_of(words, "output_dir")) is not None:
        yield "output_dir=", given, ""
    if words[:2] == ["bert", "export"] and len(words) > 3:
        yield "", words[3], ""
    # The --runs of others are what they read.
    for option in ("--out", "--profile", *(["--runs"] if words[0] == BENCHMARKS and words[1:2] != ["report"] else [])):
        if (given := option_of(words, option)) is not None:
            yield f"{option} ", given, ""
    if option_of(words, "--out") is None and (default := _default(tuple(words))):
        yield "--out ", default, " (the default)"


def option_of(words: Words, option: str) -> str | None:
    """What the command gives for an option, in one word or two; the last counts, as it does for the command."""
    return (all_of(words, option) or [None])[-1]


def all_of(words: Words, option: str) -> list[str]:
    """All that the command gives for an option."""
    given = []
    for word, after in zip(words, [*words[1:], None], strict=True):
        if word == option and after is not None:
            given.append(after)
        elif word.startswith(f"{option}="):
            given.append(word.partition("=")[2])
    return given


@cache
def _default(words: tuple[str, ...]) -> str | None:
    """Where --out is unless given; None for a command that has none, or requires it, or takes one in `runs`."""
    if words[0] != BENCHMARKS:
        return None
    # They know themselves: nothing of the library imports them.
    root = sources(list(words))[BENCHMARKS].parent
    command = [sys.executable, "-m", BENCHMARKS, "outputs", *words[1:]]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout or None
