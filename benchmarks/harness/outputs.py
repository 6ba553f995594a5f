"""Where a command of the benchmarks writes unless it is given --out."""

from pathlib import Path

from benchmarks.harness.result_paths import EXPERIMENTS, RESULTS, foreign, narrower, results_folder
from fullstride.launch.outputs import all_of, option_of
from fullstride.launch.words import Words


def default_output(words: Words) -> str | None:
    """Where --out is unless given; None for a command that has none, or requires it, or takes one in `runs`."""
    if words[:1] == ["report"] or option_of(words, "--out"):
        return None
    return _of_experiment(words) if words[0] in EXPERIMENTS else str(RESULTS)


def _of_experiment(words: Words) -> str | None:
    if option_of(words, "--code") and not option_of(words, "--gpus"):
        return None  # one training of the race, which has no result of its own
    settings = [word for word in words[1:] if "=" in word and not word.startswith("-")]
    runs, name = Path(option_of(words, "--runs") or "runs"), words[0]
    return str(results_folder(None, option_of(words, "--scale") or "", runs, [*foreign(name, settings), *_less(words)]))


def _less(words: Words) -> list[str]:
    """What an experiment's options leave out; what is no number is refused by the command itself."""
    minutes = option_of(words, "--minutes")
    try:
        seeds = [int(seed) for seed in all_of(words, "--seed")]
        given = None if minutes is None else float(minutes)
    except ValueError:
        return []
    return narrower(words[0], seeds=seeds, minutes=given, models=all_of(words, "--model"))
