"""Which metrics of a part's runs compare: those of features are by a classifier, and machines may have one each."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.experiments.meanflow.jobs import Scores, floor_of
from benchmarks.experiments.meanflow.record import alike
from benchmarks.experiments.meanflow.spec import Job, Part

# Of pixels alone, and what the classifier says besides its features.
PIXELS, LABELS = "energy distance", "labels right"


def unlike(floors: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, str]:
    """The distances that do not compare, and why: the runs of each seed must have had one classifier.

    Seeds may have one each, as on machines of their own: all is compared by it, and it adds to the spread.

    Args:
        floors: of runs, the seed and what the same training images score.

    """
    of: dict[tuple[str, int], list[float]] = {}
    for seed, floor in floors:
        for name, value in floor.items():
            of.setdefault((name, seed), []).append(value)
    told: dict[str, list[str]] = {}
    for (name, seed), values in of.items():
        if not alike(values):
            told.setdefault(name, []).append(f"{min(values):.4g} to {max(values):.4g} in the runs of seed {seed}")
    return {
        name: f"{name}: the same images score {' and '.join(each)}, which had different classifiers; give them one "
        "$FULLSTRIDE_CACHE/reference"
        for name, each in told.items()
    }


def apart(part: Part, found: Sequence[tuple[Job, Scores]]) -> dict[str, str]:
    """The metrics of a part that do not compare, and why.

    Args:
        part: of the runs.
        found: those of all arms that have a score.

    """
    floors = [(job.seed, floor_of(job, scores, part.samplers)) for job, scores in found]
    # Pixels need no classifier; the labels of training images each of them may find.
    why = unlike((seed, {name: of for name, of in floor.items() if name != PIXELS}) for seed, floor in floors)
    if why and any(LABELS in floor for _, floor in floors):
        why.setdefault(LABELS, f"{LABELS}: by different classifiers, too")
    return {name: f"{part.name}, {reason}" for name, reason in why.items()}
