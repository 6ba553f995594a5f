"""Files and folders that a command of the benchmarks writes to."""

from pathlib import Path

from benchmarks.harness.result_paths import EXPERIMENTS, RESULTS, foreign, narrower, results_folder
from fullstride.launch.outputs import Place, all_of, given_places, option_of
from fullstride.launch.words import Words


def outputs(words: Words) -> list[Place]:
    """List what a command writes to: options that it gives, and --out's default unless that lies among its runs."""
    if not words:
        return []
    # The --runs of others are what they read, or a number.
    options = ["--out", "--profile", *(["--runs"] if words[0] in EXPERIMENTS else [])]
    found = list(given_places(words, *options))
    if words[0] == "report" or option_of(words, "--out") is not None:
        return found
    default = _of_experiment(words) if words[0] in EXPERIMENTS else str(RESULTS)
    return found if default is None else [*found, ("--out ", default, " (the default)")]


def _of_experiment(words: Words) -> str | None:
    if option_of(words, "--code") and not option_of(words, "--gpus"):
        return None  # one training of the race, which has no result of its own
    settings = [word for word in words[1:] if "=" in word and not word.startswith("-")]
    runs, name = Path(option_of(words, "--runs") or "runs"), words[0]
    return str(results_folder(None, option_of(words, "--scale") or "", runs, [*foreign(name, settings), *_less(words)]))


def _less(words: Words) -> list[str]:
    """List what an experiment's options leave out; what is no number is refused by the command itself."""
    minutes = option_of(words, "--minutes")
    try:
        seeds = [int(seed) for seed in all_of(words, "--seed")]
        given = None if minutes is None else float(minutes)
    except ValueError:
        return []
    return narrower(words[0], seeds=seeds, minutes=given, models=all_of(words, "--model"))
