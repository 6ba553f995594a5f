"""Curves of runs: a figure per number that metrics.jsonl has at two steps or more, a line per run."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from benchmarks.report.pages import render
from benchmarks.report.plots import Drawn, Series, lines
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import replace_file
from fullstride.runs.folder import METRICS, read_metrics

# Numbers that are drawn first; the rest follows in order of appearance.
FIRST = ("loss", "squared_error", "energy_distance", "frechet_distance", "accuracy", "grad_norm", "lr")
PLACES = ("epoch", "images")
MOST = 12  # figures
WIDE = 30.0  # a curve that falls further is drawn over a logarithm


def folders(given: Sequence[Path]) -> dict[str, Path]:
    """Return the runs given or found in given folders, by name, or by path if names repeat."""
    each = ([one / METRICS] if (one / METRICS).is_file() else sorted(one.glob(f"*/{METRICS}")) for one in given)
    runs = list(dict.fromkeys(path.parent for paths in each for path in paths))
    if not runs:
        raise ConfigError(
            f"{', '.join(map(str, given))}: found no {METRICS} here or one folder below; give a run's folder"
        )
    alone = len({run.name for run in runs}) == len(runs)
    return {run.name if alone else str(run): run for run in runs}


def read_curves(runs: dict[str, Path]) -> pd.DataFrame:
    """Return a row per logged number: run, step, name and value."""
    found = [pd.DataFrame(columns=["run", "step", "name", "value"])]
    for label, run in runs.items():
        try:
            kept = [line for line in read_metrics(run) if "step" in line]
            written = pd.json_normalize(kept, sep=" ").drop(columns=["step", *PLACES], errors="ignore")
            numbers = written.select_dtypes("number").assign(run=label, step=[float(line["step"]) for line in kept])
            found.append(numbers.melt(["run", "step"], var_name="name"))
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{run / METRICS}: a line is incomplete ({error}); `resume=true` removes it") from None
    return pd.concat(found).replace([float("inf"), -float("inf")], float("nan")).dropna()


def _rank(name: str) -> int:
    return next((i for i, first in enumerate(FIRST) if first in name.split()), len(FIRST))


def drawings(found: pd.DataFrame) -> tuple[list[Drawn], list[str]]:
    """Return figures of varying numbers, the most informative first, and the names beyond the limit."""
    varied = found[found.groupby(["name", "run"]).step.transform("nunique") > 1]
    names, made = sorted(dict.fromkeys(varied["name"]), key=_rank), []
    for place, name in enumerate(names[:MOST]):
        rows = found[found["name"] == name]
        groups = rows.groupby("run", sort=False)
        series = [Series(str(run), dict(zip(of.step, of.value, strict=True))) for run, of in groups]
        wide = bool(rows.value.min() > 0 and rows.value.max() > WIDE * rows.value.min())
        figure = lines(series, "optimizer steps", f"{name.split()[-1]}{' (log)' * wide}", log_y=wide)
        made.append(Drawn(f"curve-{place}", f"{name} by optimizer step.", figure))
    return made, names[MOST:]


def write_runs(given: Sequence[Path], out: Path) -> tuple[Path, int]:
    """Write `index.html` under `out`; return the page and the number of runs on it."""
    found = read_curves(runs := folders(given))
    figures, left = drawings(found)
    if not figures:
        raise ConfigError(f"{', '.join(runs)}: no number in {METRICS} has been written at two steps yet")
    last = found[found["name"].map(_rank) < len(FIRST)].assign(value=lambda t: t.value.map("{:.4g}".format))
    table = last.pivot_table(index="run", columns="name", values="value", aggfunc="last", sort=False).fillna("")
    table.insert(0, "steps", found.groupby("run").step.max().map("{:,.0f}".format))
    out.mkdir(parents=True, exist_ok=True)
    shown = table.rename_axis(columns=None).reset_index()
    replace_file(out / "index.html", render("runs.html", table=shown, figures=figures, left=left))
    return out / "index.html", len(runs)
