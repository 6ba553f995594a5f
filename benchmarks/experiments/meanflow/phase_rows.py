"""Results of a phase's runs as rows of a table and as a curve, and the metrics that can be compared.

Metrics of features use a classifier, which may differ between machines.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from benchmarks.experiments.meanflow.jobs import Scores, floor_of, has, name_of, scores_of
from benchmarks.experiments.meanflow.record import alike
from benchmarks.experiments.meanflow.spec import Part, TrainingJob
from benchmarks.harness.seeds import Curve, Outcome, PartResult, mean, seeds_in_words

# Of pixels alone, and what the classifier says besides its features.
PIXELS, LABELS = "energy distance", "labels right"
FLOOR = "floor: as many training images"
# Of a run, whichever sampler.
OF_TRAINING = ("final squared error", "training s")


def unlike(floors: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, str]:
    """Return the distances that cannot be compared, and why: each seed's runs must share a classifier.

    Seeds may have different classifiers, as on different machines; that adds to the spread.

    Floors are a run's seed and the score of the same training images.
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


def apart(part: Part, found: Sequence[tuple[TrainingJob, Scores]]) -> dict[str, str]:
    """Return the metrics of a part that cannot be compared, and why."""
    floors = [(job.seed, floor_of(job, scores, part.samplers)) for job, scores in found]
    # Pixels need no classifier; the labels of training images each of them may find.
    why = unlike((seed, {name: of for name, of in floor.items() if name != PIXELS}) for seed, floor in floors)
    if why and any(LABELS in floor for _, floor in floors):
        why.setdefault(LABELS, f"{LABELS}: by different classifiers, too")
    return {name: f"{part.name}, {reason}" for name, reason in why.items()}


def rows_of(part: Part, arm: str, found: list[tuple[TrainingJob, Scores]], without: Collection[str]) -> list[Outcome]:
    """Return a row per sampler with any score; values of a training stand in its first row.

    Metrics in `without` cannot be compared.
    """
    rows = []
    settings = found[0][0].overrides
    for sampler in part.samplers:
        values: dict[str, dict[int, float]] = {}
        for job, scores in found:
            if not has(job, scores, sampler):
                continue
            for metric, value in scores_of(job, scores, sampler).items():
                if metric not in without and (sampler == part.samplers[0] or metric not in OF_TRAINING):
                    values.setdefault(metric, {})[job.seed] = value
        if values:
            rows.append(Outcome({"training": arm, "sampler": name_of(sampler)}, values, settings))
    return rows


def by_evaluations(part: PartResult) -> Curve | None:
    """Return energy distance by network evaluations, per kind of sampler of one training or per training."""
    rows = [row for row in part.rows if row.labels["sampler"]]
    several = len({row.labels["training"] for row in rows}) > 1
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = row.labels["training"] if several else row.labels["sampler"].split()[0]
        nfe, energy = (mean(list(row.values[name].values())) for name in ("NFE", "energy distance"))
        series.setdefault(name, []).append((nfe, energy))
    if max((len(points) for points in series.values()), default=0) < (3 if several else 4):
        return None
    seeds = " or ".join(sorted({seeds_in_words(row.seeds) for row in rows}))
    caption = f"{part.title}: energy distance to held-out images by network evaluations an image, mean over {seeds}"
    caption += f"; {', '.join(dict.fromkeys(row.labels['sampler'] for row in rows))}." if several else "."
    return Curve(part.name, caption, "network evaluations (log)", "energy distance (log)", series, log_x=True)
