import base64
import io
import json

import numpy as np
from PIL import Image

from fullstride.bench.experiments import (
    Claim,
    Curve,
    ExperimentResult,
    Outcome,
    PartResult,
    Picture,
    write_experiment,
)
from fullstride.report.history import History
from fullstride.report.page import render, write_page
from fullstride.report.reading import read_folder
from tests.report.made import RANDOM, SEED, write_all
from tests.report.markup import Page

MACHINE = {"cpu": "AMD EPYC", "cores": 2, "gpu": {"name": "NVIDIA H200"}, "commit": None, "date": "2031-02-03"}


def _png() -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(SEED).integers(0, 255, (16, 40), np.uint8)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _write(folder) -> dict[int, float]:
    values = {seed: RANDOM.uniform(0.1, 9) for seed in range(3)}
    rows = [
        Outcome({"code": "ours <1>"}, {"energy distance": values}, ["a=b"]),
        Outcome({"code": "floor"}, {"x": {0: 7.0}}),
    ]
    line = [(float(x), RANDOM.uniform(1, 9)) for x in range(1, 9)]
    result = ExperimentResult(
        "made",
        "A made experiment",
        "About it.",
        "gpu",
        "cuda",
        {"minutes": 10},
        [PartResult("p", "A part", "Why?", rows), PartResult("q", "Nothing", "Run?", [])],
        MACHINE,
        claims=[Claim("it is faster", "2.5 x", True), Claim("it is better", "no", False)],
        curves=[
            Curve("c", "A curve.", "s", "y", {"one": line, "two": line}),
            Curve("d", "B.", "s", "y", {"one": line}, True),
        ],
        pictures=[Picture("samples", "A grid.", _png())],
        missing=["seed 9"],
    )
    write_experiment(result, folder)
    return values


def test_an_experiment_is_on_the_page_with_its_means_claims_figures_and_what_is_missing(tmp_path):
    write_all(tmp_path)
    values = list(_write(tmp_path).values())
    text, drawn = render(read_folder(tmp_path), History(None))
    page = Page(text)
    cells = [row for table in page.tables for row in table]
    shown = next(row for row in cells if row[0] == "ours <1>")[1]
    mean, deviation = (float(part) for part in shown.split(" ±"))
    assert mean == np.round(np.mean(values), 3)
    assert abs(deviation - np.std(values, ddof=1)) < 0.06 * np.std(values, ddof=1), f"seed {SEED}"
    assert ["it is faster", "2.5 x", "yes"] in cells
    assert ["it is better", "no", "no"] in cells
    assert "Not run: seed 9." in page.text
    assert "A made experiment (gpu scale)" in page.text
    assert page.errors == []
    assert len(page.ids) == len(set(page.ids))
    names = [figure.name for figure in drawn if "made" in figure.name]
    assert names == [f"experiment-made--gpu--nvidia-h200-{part}" for part in ("c", "d", "samples")]


def test_experiments_alone_make_a_page_and_its_figures(tmp_path):
    _write(tmp_path / "results")
    page = write_page(read_folder(tmp_path / "results"), History(None), tmp_path)
    links = {target for target in Page(page.read_text()).targets if target.startswith("figures/")}
    assert links == {str(file.relative_to(tmp_path)) for file in (tmp_path / "figures").iterdir()}
    assert len(links) == 6


def test_a_picture_keeps_its_pixels_out_of_the_tables(tmp_path):
    _write(tmp_path)
    (path,) = tmp_path.glob("*.json")
    png = json.loads(path.read_text())["pictures"][0]["png"]
    text, _ = render(read_folder(tmp_path), History(None))
    assert png not in text
