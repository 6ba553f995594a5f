"""Tables of experiments: mean and standard deviation over seeds, the lowest distance in bold if clear."""

from collections.abc import Iterable, Sequence
from functools import partial

from benchmarks.harness.seeds import mean, seeds_in_words, spread
from benchmarks.report.frame import Results
from benchmarks.report.tables import Row, Table
from fullstride.errors import ConfigError

Seeds = dict[int, float]
Made = tuple[list[Row], str]
ENERGY, FEATURES = "energy distance", "FD-classifier"
FORMS = {ENERGY: ".4f", FEATURES: ".1f"}
ONE, TWO, EULER, FINE = "meanflow 1", "meanflow 2", "euler 16", "euler 50"
WORDS = {ONE: "one step", TWO: "two steps", EULER: "16 Euler steps", FINE: "50 Euler steps"}
SOLVERS = {"meanflow": "MeanFlow", "euler": "Euler", "heun": "Heun", "rk4": "RK4", "dopri5": "dopri5"}
LEARNED = {"steps": ",.0f", "minutes of steps": ".1f", "training loss": ".2f", "held-out masked loss": ".2f",
           "accuracy": ".3f", "bits/byte": ".3f"}  # fmt: skip


def in_words(seeds: Seeds | None, form: str) -> str:
    """Format mean and deviation as `0.0612 ± 0.0018`; only the mean for one seed, nothing without values."""
    if not seeds:
        return ""
    deviation = spread([*seeds.values()])
    shown = f"{mean([*seeds.values()]):z{form}}"  # z: a floor may be a zero with a sign
    return shown if deviation is None else f"{shown} ± {deviation:{form}}"


def compared(every: Sequence[Seeds | None], form: str) -> list[str]:
    """Return cells, the lowest in bold if the next is farther away than the larger standard deviation."""
    cells = [in_words(seeds, form) for seeds in every]
    there = sorted(
        (mean([*seeds.values()]), place, spread([*seeds.values()])) for place, seeds in enumerate(every) if seeds
    )
    (low, best, first), (following, _, second) = (*there, (0.0, 0, None), (0.0, 0, None))[:2]
    if first is not None and second is not None and following - low > max(first, second):
        cells[best] = f"**{cells[best]}**"
    return cells


def part_of(
    results: Results, pattern: str, part: str, machine: str, label: str = "training"
) -> tuple[str, dict[tuple[str, str, str], Seeds]]:
    """Return the file, and each seed's values by a row's label, metric and sampler; label fractions in percent."""
    file = results.newest(f"experiment-{pattern}--*", machine)
    found = results.of(file).query(f"part == {part!r}").fillna({"sampler": ""})
    if found.empty:
        raise ConfigError(f"{file}: no rows of part {part!r}; run it, or remove the table")
    values: dict[tuple[str, str, str], Seeds] = {}
    for row in found.to_dict("records"):
        factor = 100.0 if row["metric"] == "labels right" else 1.0
        own = {seed: factor * value for seed, value in row["seeds"].items()}
        values[row[label], row["metric"], row.get("sampler", "")] = own
    return file, values


def _over(every: Iterable[Seeds]) -> str:
    each = [{*seeds} for seeds in every]
    over = " or ".join(dict.fromkeys(map(seeds_in_words, sorted(each, key=len, reverse=True))))
    return f"{'Means and standard deviations over' if max(map(len, each)) > 1 else 'One run each,'} {over}."


def _arms(results: Results, machine: str, *, file: str, part: str, columns: dict[tuple[str, str], str]) -> Made:
    """Return a row per training, and in italics the scores of as many training images; differing seeds are named."""
    name, found = part_of(results, file, part, machine)
    asked = {*results.sources[name].data["conditions"]["seeds"]}
    usual = {training: found[training, ENERGY, ONE] for training, _, by in found if by}
    floors = dict.fromkeys(training for training, _, by in found if not by)
    cells = []
    for (metric, sampler), form in columns.items():
        every = [found.get((training, metric, sampler)) for training in usual]
        shown = compared(every, form) if metric in FORMS else [in_words(seeds, form) for seeds in every]
        cells.append([f"{cell} ({seeds_in_words(seeds)})" if seeds and {*seeds} != {*own} else cell
                      for cell, seeds, own in zip(shown, every, usual.values(), strict=True)])  # fmt: skip
        cells[-1] += [in_words(found.get((floor, metric, "")), form) for floor in floors]
    names = [one if {*seeds} == asked else f"{one} ({seeds_in_words(seeds)})" for one, seeds in usual.items()]
    rows = zip([*names, *(f"*{floor}*" for floor in floors)], *cells, strict=True)
    return [((*row,), (name,)) for row in rows], _over(seeds for (*_, by), seeds in found.items() if by)


def _solvers(results: Results, machine: str, *, scale: str) -> Made:
    """Return energy distances of one network's samplers, with a row per number of evaluations."""
    file, found = part_of(results, f"phase3--{scale}", "solvers", machine)
    of = {(metric, by): seeds for (_, metric, by), seeds in found.items()}
    (floor,) = (f"*{training}*" for training, metric, by in found if metric == ENERGY and not by)
    rows: dict[str, dict[str, Seeds]] = {}
    for by in sorted(
        (by for metric, by in of if metric == "NFE" and by), key=lambda by: mean([*of["NFE", by].values()])
    ):
        rows.setdefault(in_words(of["NFE", by], ".0f").removesuffix(" ± 0"), {})[by.partition(" ")[0]] = of[ENERGY, by]
    kinds = [kind for kind in SOLVERS if any(kind in row for row in rows.values())]
    cells = [(label, *compared([row.get(kind) for kind in kinds], FORMS[ENERGY])) for label, row in rows.items()]
    cells.append((floor, *[in_words(of[ENERGY, ""], FORMS[ENERGY])] * len(kinds)))
    return [(row, (file,)) for row in cells], _over(seeds for (*_, by), seeds in found.items() if by)


def _bert(results: Results, machine: str, *, scale: str) -> Made:
    """Return the tables of each model's learning progress."""
    file, found = part_of(results, f"bert--{scale}", "learned", machine, "model")
    models = dict.fromkeys(model for model, *_ in found)
    cells = ((model, *(in_words(found[model, name, ""], form) for name, form in LEARNED.items())) for model in models)
    return [(row, (file,)) for row in cells], _over(found.values())


def _table(file: str, part: str, samplers: Sequence[str], more: dict[tuple[str, str], str] | None = None) -> Table:
    columns = {(metric, sampler): form for metric, form in FORMS.items() for sampler in samplers} | (more or {})
    header = [f"{metric}{', %' * (metric not in FORMS)}, {WORDS[sampler]}" for metric, sampler in columns]
    return Table(("training", *header), partial(_arms, file=file, part=part, columns=columns))


RIGHT = {("labels right", ONE): ".1f"}
ON_CPU = {"phase5": ("objective", "objective-labels", "objective-unweighted"), "phase6": ("weight", "weight-labels")}
SOLVED, LEARNS = ("network evaluations", *SOLVERS.values()), ("model", *LEARNED)
TABLES = {
    **{f"phase3-solvers-{scale}": Table(SOLVED, partial(_solvers, scale=scale)) for scale in ("cpu", "gpu")},
    **{f"phase4-{part}-gpu": _table("phase4--gpu", part, (ONE, TWO, EULER), RIGHT)
       for part in ("ratio", "times", "power")},
    **{f"{phase}-{part}-cpu": _table(f"{phase}--cpu", part, (ONE, TWO, FINE))
       for phase, parts in ON_CPU.items() for part in parts},
    "phase5-objective-gpu": _table("phase5--gpu", "objective", (ONE, TWO, FINE)),
    **{f"bert-{scale}": Table(LEARNS, partial(_bert, scale=scale)) for scale in ("cpu", "gpu")},
}  # fmt: skip
