"""Where a command writes in a container, and whether that stays."""

import posixpath
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from fullstride.bench.places import RESULTS, foreign, narrower, results_folder
from fullstride.errors import ConfigError
from fullstride.launch.container import WORK
from fullstride.launch.words import Words, value_of


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
    for option in ("--out", "--profile", *(["--runs"] if words[0] == "experiment" else [])):
        if (given := option_of(words, option)) is not None:
            yield f"{option} ", given, ""
    if option_of(words, "--out") is None and (default := _default(words)):
        yield "--out ", default, " (the default)"


def option_of(words: Words, option: str) -> str | None:
    """What the command gives for an option, in one word or two; the last counts, as it does for the command."""
    return (_all_of(words, option) or [None])[-1]


def _all_of(words: Words, option: str) -> list[str]:
    """All that the command gives for an option."""
    given = []
    for word, after in zip(words, [*words[1:], None], strict=True):
        if word == option and after is not None:
            given.append(after)
        elif word.startswith(f"{option}="):
            given.append(word.partition("=")[2])
    return given


def _default(words: Words) -> str | None:
    """Where --out is unless given; None for a command that has none, or requires it, or takes one in `runs`."""
    if words[0] == "bench":
        return str(RESULTS)
    if words[0] == "experiment":
        return _of_experiment(words)
    return None


def _of_experiment(words: Words) -> str | None:
    if option_of(words, "--code") and not option_of(words, "--gpus"):
        return None  # one training of the race, which has no result of its own
    settings = [word for word in words[2:] if "=" in word and not word.startswith("-")]
    runs, name = Path(option_of(words, "--runs") or "runs"), "".join(words[1:2])
    return str(results_folder(None, option_of(words, "--scale") or "", runs, [*foreign(name, settings), *_less(words)]))


def _less(words: Words) -> list[str]:
    """What an experiment's options leave out; what is no number is refused by the command itself."""
    minutes = option_of(words, "--minutes")
    try:
        seeds = [int(seed) for seed in _all_of(words, "--seed")]
        given = None if minutes is None else float(minutes)
    except ValueError:
        return []
    return narrower("".join(words[1:2]), seeds=seeds, minutes=given, models=_all_of(words, "--model"))
