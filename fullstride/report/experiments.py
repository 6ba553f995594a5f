"""Experiments: tables of means and spreads over seeds, figures, grids of images, claims and what became of them."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from fullstride.report.drawing import Drawn, Series
from fullstride.report.figures import curves, grid
from fullstride.report.reading import Source
from fullstride.report.tables import Cell, Judge, Table, number, origin_line, plain

PATHS = (
    "fullstride/meanflow",
    "fullstride/bert",
    "fullstride/step",
    "fullstride/jvp",
    ":(exclude)fullstride/**/bench*",
)
VERDICTS = {True: "yes", False: "no", None: "not judged"}


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
    conditions = "; ".join(f"{key} {plain(value)}" for key, value in data["conditions"].items())
    return ShownExperiment(
        source,
        anchor,
        f"{data['title']} ({data['scale']} scale)",
        f"{data['about']} Conditions: {conditions}.",
        origin_line(source, judge, ()),
        [*tables, *([_claims(data["claims"])] if data["claims"] else [])],
        figures,
        data["missing"],
    )


def part_table(part: dict[str, Any]) -> Table:
    """One question: a row an outcome, mean and standard deviation over seeds."""
    labels = tuple(dict.fromkeys(name for row in part["rows"] for name in row["labels"]))
    metrics = tuple(dict.fromkeys(name for row in part["rows"] for name in row["metrics"]))
    rows: list[list[Cell]] = [
        [*(row["labels"].get(name, "") for name in labels), *(_cell(row["metrics"].get(name)) for name in metrics)]
        for row in part["rows"]
    ]
    counts = {len(found["seeds"]) for row in part["rows"] if row["settings"] for found in row["metrics"].values()}
    seeds = f"{' or '.join(str(count) for count in sorted(counts))} seed{'' if counts == {1} else 's'}"
    caption = f"{part['title']}. {part['question']} Mean ± standard deviation, {seeds}."
    return Table(caption, (*labels, *metrics), rows, text=len(labels))


def _cell(metric: dict[str, Any] | None) -> str:
    """Mean and spread, with as many places as the mean's four digits have."""
    if metric is None:
        return ""
    spread = metric["spread"]
    return number(metric["mean"]) + (f" ±{number(spread, 2)}" if spread else "")


def _claims(claims: list[dict[str, Any]]) -> Table:
    rows: list[list[Cell]] = [[claim["text"], claim["found"], VERDICTS[claim["holds"]]] for claim in claims]
    return Table("What was to be checked.", ("claim", "found", "holds"), rows, text=3)


def _curve(curve: dict[str, Any], anchor: str) -> Drawn:
    series = [Series(name, dict(points)) for name, points in curve["series"].items()]
    figure = curves(series, curve["xlabel"], curve["ylabel"], curve["log_x"], curve["log_y"])
    return Drawn(f"{anchor}-{curve['name']}", curve["caption"], figure, curve["caption"])


def _picture(picture: dict[str, Any], anchor: str) -> Drawn:
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["png"]))))
    return Drawn(f"{anchor}-{picture['name']}", picture["caption"], grid(pixels), picture["caption"])
