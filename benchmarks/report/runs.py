"""Runs as curves: every number that metrics.jsonl has at two steps or more, a figure each, a line a run."""

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from markupsafe import Markup

from benchmarks.report.drawing import Drawn, Series, write_files
from benchmarks.report.figures import curves
from benchmarks.report.page import environment
from benchmarks.report.tables import Cell, Table
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import read_kept, replace_file
from fullstride.runs.folder import METRICS, read_metrics

# What is drawn first; the rest follows in the order in which it comes.
FIRST = ("loss", "squared_error", "energy_distance", "frechet_distance", "accuracy", "grad_norm", "lr")
PLACES = ("step", "epoch", "images")
MOST_FIGURES, MOST_RUNS = 12, 5
# A curve that falls further is drawn over a logarithm.
WIDE = 30.0
Curves = dict[str, dict[str, dict[float, float]]]  # by number, by run, by step


def folders(given: Sequence[Path]) -> list[Path]:
    """The runs that are given, or lie in what is given.

    Raises:
        ConfigError: if there is none, or there are more than can be told apart.

    """
    found = [
        path for one in given for path in ([one] if (one / METRICS).is_file() else sorted(one.glob(f"*/{METRICS}")))
    ]
    runs = list(dict.fromkeys(path.parent if path.name == METRICS else path for path in found))
    if not runs:
        raise ConfigError(f"{', '.join(map(str, given))}: no {METRICS} there or one folder below; name a run's folder")
    if len(runs) > MOST_RUNS:
        names = ", ".join(run.name for run in runs[: 2 * MOST_RUNS])
        more = ", ..." if len(runs) > 2 * MOST_RUNS else ""
        raise ConfigError(f"{len(runs)} runs ({names}{more}), expected at most {MOST_RUNS}; name those to compare")
    return runs


def numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every finite number of a line, nested ones under all of their names."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from numbers(value, f"{name} ")
        elif isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            yield name, float(value)


def read_curves(runs: Sequence[Path]) -> Curves:
    """What varies, by the number's name and the run's.

    Raises:
        ConfigError: if a line is no JSON, or its step no number.

    """
    found: Curves = {}
    for run, label in zip(runs, _labels(runs), strict=True):
        for line in _lines(run):
            for name, value in numbers({key: v for key, v in line.items() if key not in PLACES}):
                found.setdefault(name, {}).setdefault(label, {})[line["step"]] = value
    return {name: lines for name, lines in found.items() if any(len(values) > 1 for values in lines.values())}


def _lines(run: Path) -> list[dict[str, Any]]:
    try:
        return [line | {"step": float(line["step"])} for line in read_metrics(run) if "step" in line]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{run / METRICS}: a line is not whole ({error}); `resume=true` cuts it off") from None


def _labels(runs: Sequence[Path]) -> list[str]:
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _rank(name: str) -> int:
    words = name.split()
    return next((i for i, first in enumerate(FIRST) if first in words), len(FIRST))


def drawings(found: Curves) -> tuple[list[Drawn], list[str]]:
    """Figures, the most telling first, and the names of what is too much."""
    names = sorted(found, key=_rank)
    made = []
    for place, name in enumerate(names[:MOST_FIGURES]):
        series = [Series(label, values) for label, values in found[name].items()]
        every = [y for one in series for y in one.values.values()]
        wide = min(every) > 0 and max(every) > WIDE * min(every)
        figure = curves(series, "optimizer steps", f"{name.split()[-1]}{' (log)' * wide}", log_y=wide)
        made.append(Drawn(f"curve-{place}", f"{name} by optimizer step.", figure, f"{name} by optimizer step"))
    return made, names[MOST_FIGURES:]


def overview(runs: Sequence[Path]) -> Table:
    """A row a run: what it trained, how far, and its last numbers."""
    rows: list[list[Cell]] = []
    for run, label in zip(runs, _labels(runs), strict=True):
        lines, config = _lines(run), _config(run)
        last = {name: value for line in lines for name, value in numbers(line)}
        chosen = [f"{key} {last[key]:.4g}" for key in FIRST if key in last]
        rows.append([label, config, f"{last.get('step', 0):,.0f}", "; ".join(chosen)])
    return Table("The runs, and the last of their numbers.", ("run", "what", "steps", "last"), rows, text=4)


def _config(run: Path) -> str:
    file = run / "config.json"
    found = read_kept(file) if file.is_file() else {}
    groups = (found.get(group) for group in ("data", "model", "loss"))
    return ", ".join(str(group["name"]) for group in groups if isinstance(group, dict) and "name" in group)


def write_runs(given: Sequence[Path], out: Path) -> tuple[Path, int]:
    """Write `index.html` and `figures/` under `out`; returns the page and how many runs are on it.

    Raises:
        ConfigError: if there are no runs, too many, nothing that varies, or a file that is not whole.
        OSError: if the page cannot be written.

    """
    runs = folders(given)
    figures, left = drawings(read_curves(runs))
    if not figures:
        raise ConfigError(f"{', '.join(map(str, runs))}: nothing in {METRICS} was written at two steps yet")
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for drawn in figures:
        write_files(drawn, out / "figures")
    made = environment()
    style = Markup(made.get_template("page.css").render())
    text = made.get_template("runs.html").render(style=style, table=overview(runs), figures=figures, left=left)
    replace_file(out / "index.html", text)
    return out / "index.html", len(runs)
