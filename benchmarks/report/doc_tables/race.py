"""The tables of the documentation about quality against time, beside the official code."""

from typing import Any

from benchmarks.harness.seeds import mean, seeds_in_words, spread
from benchmarks.report.doc_tables.over_seeds import Metric, compared, mean_and_spread, sampler_in_words, seeds_of
from benchmarks.report.markdown import MarkdownTable, the_experiment, the_file, the_part
from benchmarks.report.reading import Folder, Source
from fullstride.errors import ConfigError

CODES = ("official", "fullstride")
# What a distance is told with; one that the runs' classifiers do not share is not in the result.
FORMS = {"FD-classifier": ".1f", "energy distance": ".3f"}
TRAINING, WITH_START = "seconds of training", "seconds with start-up"


def race(metric: str, scale: str, folder: Folder) -> MarkdownTable:
    """A distance of one-step samples of the codes after each tenth of the time.

    In bold is the lowest, if the next one is farther away than the larger standard deviation of the two. Marks by the
    clock with start-up are left to the claims: there the codes have trained for different times.

    Args:
        metric: of `FORMS`.
        scale: of the race.
        folder: the results.

    Raises:
        ConfigError: if the result has no such distance.

    """
    source = the_experiment(folder, f"experiment-time-to-quality--{scale}--")
    marks = _marks(source)
    if metric not in _distances(marks):
        raise ConfigError(f"{source.name}: no {metric}, as the runs share no classifier; take the table out")
    codes = _told_of(marks, CODES)
    every = {code: _seeds(marks, code) for code in codes}
    table = MarkdownTable(("minutes of training", *codes), note=_note(source, every))
    for of in marks.values():
        cells = compared([of.get(code, {}).get(metric) for code in codes], FORMS[metric])
        minutes = mean([metrics[TRAINING]["mean"] / 60 for metrics in of.values()])
        table.add(f"{minutes:.1f}{_fewer(of, every)}", *cells, of=source)
    return table


def end(scale: str, folder: Folder) -> MarkdownTable:
    """What starting took, steps, and every sampler's distances at the end of the time, in bold as in `race`."""
    return _end(the_experiment(folder, f"experiment-time-to-quality--{scale}--"), CODES, ("steps",))


def falling(scale: str, folder: Folder) -> MarkdownTable:
    """The same of trainings whose rate fell to zero, each over a time of its own, which is told; of codes that ran."""
    return _end(the_experiment(folder, f"experiment-time-to-quality-annealed--{scale}--"), (), (TRAINING, "steps"))


def _end(source: Source, expected: tuple[str, ...], told: tuple[str, ...]) -> MarkdownTable:
    marks, rows = _marks(source), the_part(source, "end")
    codes = _told_of(marks, expected)
    samplers = list(dict.fromkeys(row["labels"]["sampler"] for row in rows if row["labels"]["sampler"]))
    columns = [(metric, sampler) for metric in _distances(marks) for sampler in samplers]
    header = ("code", "start-up, s", *told, *(f"{metric}, {sampler_in_words(name)}" for metric, name in columns))
    at_last = {code: _last(source, marks, code) for code in codes}
    ended = {code: seeds_of([last[TRAINING]]) for code, last in at_last.items()}
    table = MarkdownTable(header, note=_note(source, ended))
    found = {(row["labels"]["code"], row["labels"]["sampler"]): row["metrics"] for row in rows}
    pairs = ([found.get((code, sampler), {}).get(metric) for code in codes] for metric, sampler in columns)
    cells = [compared(pair, FORMS[metric]) for (metric, _), pair in zip(columns, pairs, strict=True)]
    for place, code in enumerate(codes):
        named = f"{code} ({seeds_in_words(ended[code])})"
        means = (f"{at_last[code][name]['mean']:,.0f}" for name in told)
        table.add(named, _start(at_last[code]), *means, *(pair[place] for pair in cells), of=source)
    for row in (row for row in rows if not row["labels"]["sampler"]):
        cells = (_cell(row["metrics"], metric) for metric, _ in columns)
        table.add(f"*{row['labels']['code']}*", "", *("" for _ in told), *cells, of=source)
    return table


def reached(source: Source, clock: str) -> tuple[float, int]:
    """Seconds after which means over seeds of fullstride's one-step samples are, by every distance, where the official
    code's are at the end of its time; and of how many seeds both have such a mean.

    Args:
        source: the race.
        clock: `TRAINING` or `WITH_START`.

    Raises:
        ConfigError: if that was not reached.

    """
    rows = sorted(the_part(source, "by-minute"), key=lambda row: row["metrics"][clock]["mean"])
    theirs, ours = ([row["metrics"] for row in rows if row["labels"]["code"] == code] for code in CODES)
    end = 60 * source.data["conditions"]["minutes"] * 1.01  # the last step ends a little after it
    targets = [of for of in theirs if of[clock]["mean"] <= end][-1:]
    there = [of for of in ours if targets and all(of[name]["mean"] <= targets[0][name]["mean"] for name in FORMS)]
    if not there:
        raise ConfigError(f"{source.name}: fullstride did not reach the official code's quality; take the row out")
    return there[0][clock]["mean"], len(seeds_of([there[0][clock]]) & seeds_of([targets[0][clock]]))


def recipes(folder: Folder) -> MarkdownTable:
    """What was tried for the recipe: each with its last mark, and the one at which the solver was scored, too."""
    source = the_file(folder, "meanflow-race-recipes")
    columns = [(metric, sampler) for metric in FORMS for sampler in ("one step", "50 Euler steps")]
    table = MarkdownTable(("rate", "batch", "steps", "images, k", *(f"{metric}, {name}" for metric, name in columns)))
    for row in _told(source.data["rows"]):
        cells = (format(row[name][metric], FORMS[metric]) if name in row else "" for metric, name in columns)
        named = (
            f"{row['rate']:.0e}".replace("e-0", "e-"),
            str(row["batch"]),
            f"{row['step']:,}",
            f"{row['images'] / 1000:,.0f}",
        )
        table.add(*named, *cells, of=source)
    return table


def _told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = {(row["rate"], row["batch"]): row for row in rows}
    return [row for row in rows if "50 Euler steps" in row or row is last[row["rate"], row["batch"]]]


def _marks(source: Source) -> dict[int, dict[str, dict[str, Metric]]]:
    """Metrics by tenth of the time and code."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in the_part(source, "by-minute"):
        if row["labels"]["mark"].isdigit():
            found.setdefault(int(row["labels"]["mark"]), {})[row["labels"]["code"]] = row["metrics"]
    if not found:
        raise ConfigError(f"{source.name}: no mark at a tenth of the time; run the experiment again")
    return dict(sorted(found.items()))


def _told_of(marks: dict[int, dict[str, dict[str, Metric]]], expected: tuple[str, ...]) -> tuple[str, ...]:
    """The codes that have any mark, and those that are expected to; others than `CODES` as the result orders them."""
    there = dict.fromkeys(code for of in marks.values() for code in of)
    return tuple(code for code in dict.fromkeys((*CODES, *there)) if code in there or code in expected)


def _distances(marks: dict[int, dict[str, dict[str, Metric]]]) -> list[str]:
    there = {name for of in marks.values() for metrics in of.values() for name in metrics}
    return [name for name in FORMS if name in there]


def _seeds(marks: dict[int, dict[str, dict[str, Metric]]], code: str) -> set[int]:
    """Those that have reached any mark."""
    return {seed for of in marks.values() if code in of for seed in seeds_of([of[code][TRAINING]])}


def _fewer(of: dict[str, dict[str, Metric]], every: dict[str, set[int]]) -> str:
    """Of a mark, which seeds its means are of where not all have reached it."""
    there = {code: seeds_of([metrics[TRAINING]]) for code, metrics in of.items()}
    told = [f"{code}: {seeds_in_words(seeds)}" for code, seeds in there.items() if seeds != every[code]]
    return f" ({'; '.join(told)})" if told else ""


def _note(source: Source, every: dict[str, set[int]]) -> str:
    """Over which seeds, and what of the race was not run."""
    several = any(len(seeds) > 1 for seeds in every.values())
    of = "; ".join(f"{code}{' over' * several} {seeds_in_words(seeds)}" for code, seeds in every.items() if seeds)
    missing = "; ".join(source.data.get("missing", []))
    what = "Means and standard deviations" if several else "One run of each"
    return f"{what}: {of}." + (f" Not run: {missing}." if missing else "")


def _last(source: Source, marks: dict[int, dict[str, dict[str, Metric]]], code: str) -> dict[str, Metric]:
    """A code's metrics at the last mark that it has reached."""
    if found := [of[code] for of in marks.values() if code in of]:
        return found[-1]
    raise ConfigError(f"{source.name}: no mark of {code}; run it, or take the table out")


def _start(metrics: dict[str, Metric]) -> str:
    """Seconds between the two clocks, which every mark of a seed has."""
    values = [metrics[WITH_START]["seeds"][seed] - one for seed, one in metrics[TRAINING]["seeds"].items()]
    return mean_and_spread({"mean": mean(values), "spread": spread(values)}, ".0f")


def _cell(metrics: dict[str, Metric], metric: str) -> str:
    return mean_and_spread(metrics[metric], FORMS[metric]) if metric in metrics else ""
