"""Experiments: tables of means and spreads over seeds, figures, grids of images, claims and what became of them."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness.experiment_table import VERDICTS, in_words, mean_and_spread
from benchmarks.harness.seeds import Outcome, PartResult
from benchmarks.report.case import TIMING
from benchmarks.report.drawing import Drawn, Series
from benchmarks.report.figures import curves, grid
from benchmarks.report.reading import Source
from benchmarks.report.tables import Cell, Judge, Table, number, origin_line, plain
from fullstride.measure.roofline import Ceilings

# The code that trains, scores and, of BERT, times; not what hands over what was typed.
MEANFLOW = (
    "benchmarks/experiments/meanflow",
    "fullstride/meanflow",
    "fullstride/step/torch",
    "fullstride/jvp",
    "fullstride/device/cuda_graph.py",
)
BERT = (
    "benchmarks/cases/bert",
    "benchmarks/cases/step_jax",
    "benchmarks/experiments/bert",
    "fullstride/bert",
    "fullstride/step/jax",
    *TIMING,
    *(
        f":(exclude)benchmarks/cases/step_jax/{name}.py"
        for name in ("options", "table", "targets", "train_step", "tree")
    ),
)


def paths_of(source: Source) -> tuple[str, ...]:
    """The code that an experiment's numbers depend on, as git's pathspecs."""
    return BERT if source.data["experiment"] == "bert" else MEANFLOW


@dataclass
class ShownExperiment:
    """A file of an experiment, as the page shows it.

    Attributes:
        source: the file.
        anchor: its name in links.
        title: of its section.
        about: what it shows, and what it cannot.
        origin: where its numbers come from.
        tables: one a question, then claims.
        figures: curves and grids.
        missing: what of it was not run.

    """

    source: Source
    anchor: str
    title: str
    about: str
    origin: str
    tables: list[Table]
    figures: list[Drawn]
    missing: list[str]


def show_experiment(source: Source, judge: Judge) -> ShownExperiment:
    """Everything of the file."""
    data, anchor = source.data, source.name.removesuffix(".json").replace(".", "-")
    tables = [part_table(part) for part in data["parts"] if part["rows"]]
    figures = [_curve(curve, anchor) for curve in data["curves"]]
    figures += [_picture(picture, anchor) for picture in data.get("pictures", [])]
    told = {key: value for key, value in data["conditions"].items() if value not in ("", [])}
    conditions = "; ".join(f"{key} {plain(value)}" for key, value in told.items())
    return ShownExperiment(
        source,
        anchor,
        f"{data['title']} ({data['scale']} scale, {source.machine.removeprefix('NVIDIA ')})",
        f"{data['about']} Conditions: {conditions}.{_ceilings(data)}",
        origin_line(source, judge, ()),
        [*tables, *([_claims(data["claims"])] if data["claims"] else [])],
        figures,
        data["missing"],
    )


def _ceilings(data: dict[str, Any]) -> str:
    """The rates that steps were measured beside; nothing of a file that has none."""
    found = [f"{name} {Ceilings(**rates)}" for name, rates in data.get("ceilings", {}).items()]
    return f" Ceilings: {'; '.join(found)}." if found else ""


def part_table(part: dict[str, Any]) -> Table:
    """One question: a row an outcome, mean and standard deviation; rows of different seeds name them."""
    rows = [Outcome.of(row) for row in part["rows"]]
    words = in_words(PartResult(part["name"], part["title"], part["question"], rows), _cell)
    header = (*words.text, *words.metrics)
    return Table(f"{part['title']}. {words.caption}", header, [[*row] for row in words.rows], text=len(words.text))


def _cell(values: list[float]) -> str:
    """Mean and spread; a count that is the same for all seeds as the whole number that it is."""
    if len(set(values)) == 1 and float(values[0]).is_integer():
        return f"{values[0]:,.0f}"
    return mean_and_spread(values) if len(values) > 1 else number(values[0])


def _claims(claims: list[dict[str, Any]]) -> Table:
    rows: list[list[Cell]] = [[claim["text"], claim["found"], VERDICTS[claim["holds"]]] for claim in claims]
    return Table("What was to be checked.", ("claim", "found", "holds"), rows, text=3)


def _curve(curve: dict[str, Any], anchor: str) -> Drawn:
    series = [Series(name, dict(points)) for name, points in curve["series"].items()]
    figure = curves(series, curve["xlabel"], curve["ylabel"], curve["log_x"], curve["log_y"])
    return Drawn(f"{anchor}-{curve['name']}", curve["caption"], figure, curve["caption"])


def _picture(picture: dict[str, Any], anchor: str) -> Drawn:
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["png"]))))
    figure = grid(pixels, picture.get("rows", []))
    return Drawn(f"{anchor}-{picture['name']}", picture["caption"], figure, picture["caption"])
