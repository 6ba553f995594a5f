"""The table of one step's distances beside those of 50 Euler steps of the same weights, of every training on a GPU."""

from collections.abc import Iterator
from typing import Any

from benchmarks.harness.seeds import mean, seeds_in_words
from benchmarks.report.doc_tables.over_seeds import FINE, ONE, Metric, sampler_in_words
from benchmarks.report.markdown import MarkdownTable, the_experiment, the_part
from benchmarks.report.reading import Folder, Source
from fullstride.errors import ConfigError

# What one step may be at: the claim that the race judges.
CLAIMED = 1.1
FORMS = {"FD-classifier": ".1f", "energy distance": ".4f"}
# By how its file's name starts: a part, what its trainings are called there, and what all of them are.
PLACES = {
    "experiment-phase3--gpu--": ("solvers", "training", "the preset's network, labels"),
    "experiment-phase5--gpu--": ("objective", "training", "the preset's network"),
    "experiment-time-to-quality--gpu--": ("end", "code", "the race"),
    "experiment-time-to-quality-annealed--gpu--": ("end", "code", "the race, rate to zero"),
}


def one_step(folder: Folder) -> MarkdownTable:
    """A row each training whose solver was scored, over the seeds that have both scores; in bold what is as claimed."""
    columns = (sampler_in_words(ONE), sampler_in_words(FINE), "one over the other")
    header = [f"{metric}, {what}" for metric in FORMS for what in columns]
    table = MarkdownTable(("training", *header))
    for start, (part, label, what) in PLACES.items():
        source = the_experiment(folder, start)
        for training, one, solver in _pairs(source, part, label):
            seeds = sorted(_both(source, one, solver))
            told = (_cells(one[metric], solver[metric], seeds, form) for metric, form in FORMS.items())
            cells = [cell for each in told for cell in each]
            table.add(f"{what}: {training} ({seeds_in_words(map(int, seeds))})", *cells, of=source)
    table.note = f"Means over the seeds that have both; in bold where one step is at {CLAIMED:.2f} x or less."
    return table


def _pairs(source: Source, part: str, label: str) -> Iterator[tuple[str, dict[str, Metric], dict[str, Metric]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in the_part(source, part):
        found.setdefault(row["labels"][label], {})[row["labels"]["sampler"]] = row["metrics"]
    yield from ((training, of[ONE], of[FINE]) for training, of in found.items() if ONE in of and FINE in of)


def _both(source: Source, one: dict[str, Metric], solver: dict[str, Metric]) -> set[str]:
    if found := set.intersection(*(set(of[metric]["seeds"]) for of in (one, solver) for metric in FORMS)):
        return found
    raise ConfigError(f"{source.name}: no seed has one step's score and the solver's; score the solver of one")


def _cells(one: Metric, solver: Metric, seeds: list[str], form: str) -> tuple[str, str, str]:
    near, far = (mean([of["seeds"][seed] for seed in seeds]) for of in (one, solver))
    ratio = f"{near / far:.2f} x"
    return format(near, form), format(far, form), f"**{ratio}**" if near <= CLAIMED * far else ratio
