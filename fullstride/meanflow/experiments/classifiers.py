"""Which metrics of a part's runs compare: those of features are by a classifier, and machines may have one each."""

from collections.abc import Sequence

from fullstride.meanflow.experiments.jobs import Scores, floor_of
from fullstride.meanflow.experiments.record import alike
from fullstride.meanflow.experiments.spec import Job, Part

# Of pixels alone, and what the classifier says besides its features.
PIXELS, LABELS = "energy distance", "labels right"


def apart(part: Part, found: Sequence[tuple[Job, Scores]]) -> dict[str, str]:
    """The metrics that do not compare, and why: the runs of each seed must have had one classifier.

    Seeds may have one each, which adds to the spread.

    Args:
        part: of the runs.
        found: the finished ones of all arms, with their scores.

    """
    floors: dict[tuple[str, int], list[float]] = {}
    for job, scores in found:
        for name, value in floor_of(job, scores, part.samplers[0]).items():
            if name != PIXELS:
                floors.setdefault((name, job.seed), []).append(value)
    why = {
        name: f"{part.name}, {name}: the same images score {min(of):.4g} to {max(of):.4g} in the runs of seed {seed}, "
        "which had different classifiers; give them one $FULLSTRIDE_CACHE/reference"
        for (name, seed), of in floors.items()
        if not alike(of)
    }
    # By the same classifier; the labels of training images each of them may find.
    if why and any(name == LABELS for name, _ in floors):
        why.setdefault(LABELS, f"{part.name}, {LABELS}: by different classifiers, too")
    return why
