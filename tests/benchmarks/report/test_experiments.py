import base64
import io
import json
import re
from decimal import Context
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.harness.experiment_table import mean_and_spread
from benchmarks.harness.seeds import (
    Claim,
    Curve,
    ExperimentResult,
    Outcome,
    PartResult,
    Picture,
    write_experiment,
)
from benchmarks.report.experiments import part_table
from benchmarks.report.history import History
from benchmarks.report.page import render, write_page
from benchmarks.report.reading import read_folder
from fullstride.errors import ConfigError
from fullstride.measure.roofline import Ceilings
from tests.benchmarks.report.made import RANDOM, SEED, write_all
from tests.benchmarks.report.markup import Page

MACHINE = {"cpu": "AMD EPYC", "cores": 2, "gpu": {"name": "NVIDIA H200"}, "commit": None, "date": "2031-02-03"}


SEEDS = {"a": (0, 1, 2), "b": (0, 2)}


def _png() -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(SEED).integers(0, 255, (16, 40), np.uint8)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _write(folder, ceilings: dict[str, Ceilings] | None = None) -> dict[int, float]:
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
        pictures=[Picture("samples", "A grid.", _png(), ["1.0", "2.0"])],
        missing=["seed 9"],
        ceilings=ceilings or {},
    )
    write_experiment(result, folder)
    return values


def _places(value: float, digits: int) -> int:
    """Decimals of so many significant digits, as Python's decimal numbers round."""
    rounded = Context(digits).create_decimal_from_float(value).normalize(Context(digits))
    return max(digits - 1 - rounded.adjusted(), 0)


def test_an_experiment_is_on_the_page_with_its_means_claims_figures_and_what_is_missing(tmp_path):
    write_all(tmp_path)
    values = list(_write(tmp_path).values())
    text, drawn = render(read_folder(tmp_path), History(None))
    page = Page(text)
    cells = [row for table in page.tables for row in table]
    shown = next(row for row in cells if row[0] == "ours <1>")[1]
    numbers = float(np.mean(values)), float(np.std(values, ddof=1))
    # Up to the spread's second digit, and the mean's fourth.
    places = min(_places(numbers[0], 4), _places(numbers[1], 2))
    assert shown == f"{numbers[0]:,.{places}f} ±{numbers[1]:,.{places}f}", f"seed {SEED}"
    assert ["it is faster", "2.5 x", "yes"] in cells
    assert ["it is better", "no", "no"] in cells
    assert "Not run: seed 9." in page.text
    assert "A made experiment (gpu scale, H200)" in page.text
    assert page.errors == []
    assert len(page.ids) == len(set(page.ids))
    grid = next(figure for figure in drawn if figure.name.endswith("samples")).figure.axes[0]
    # Sixteen pixels high, two rows of eight.
    assert {tick: text.get_text() for tick, text in zip(grid.get_yticks(), grid.get_yticklabels(), strict=True)} == {
        3.5: "1.0",
        11.5: "2.0",
    }
    names = [figure.name for figure in drawn if "made" in figure.name]
    assert names == [f"experiment-made--gpu--nvidia-h200-{part}" for part in ("c", "d", "samples")]


def test_rates_measured_beside_steps_are_on_the_page_and_files_without_them_are_read(tmp_path):
    rates = Ceilings(690e12, 4.2e12, "8192^3 bfloat16", 1, [1.0], [1.0])
    for ceilings, shown in ((None, False), ({"base": rates}, True)):
        _write(tmp_path, ceilings)
        text, _ = render(read_folder(tmp_path), History(None))
        said = "Ceilings: base 690 TFLOP/s (8192^3 bfloat16), 4.2 TB/s copy."
        assert (said in Page(text).text) is shown


def test_experiments_alone_make_a_page_and_its_figures(tmp_path):
    _write(tmp_path / "results")
    page = write_page(read_folder(tmp_path / "results"), History(None), tmp_path)
    links = {target for target in Page(page.read_text()).targets if target.startswith("figures/")}
    assert links == {str(file.relative_to(tmp_path)) for file in (tmp_path / "figures").iterdir()}
    assert len(links) == 6


def _damage(folder, change) -> Path:
    _write(folder)
    (path,) = folder.glob("*.json")
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.update(conditions=[1]), "conditions is of type list, expected dict"),
        (lambda data: data.update(parts=None), "parts is of type NoneType, expected list"),
        (lambda data: data["parts"][0].update(rows=None), "a part is not whole"),
        (lambda data: data["parts"].append(7), "a part is not whole"),
        (lambda data: data["parts"][0]["rows"][0].pop("labels"), "a part is not whole .*'labels'"),
        (
            lambda data: data["parts"][0]["rows"][0]["metrics"]["energy distance"]["seeds"].update({"1": "2"}),
            "no number",
        ),
        (lambda data: data["parts"][0]["rows"][0]["metrics"]["energy distance"].update(seeds={"x": 2}), "not whole"),
        (lambda data: data["parts"][0]["rows"][0]["metrics"]["energy distance"].update(mean="x"), "'x' is no number"),
    ],
)
def test_a_damaged_experiment_is_named_with_the_reason(tmp_path, change, why):
    path = _damage(tmp_path, change)
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: .*{why}.*; run the experiment again"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["claims"][0].update(holds="perhaps"),
        lambda data: data["curves"][0].update(series=[1]),
        lambda data: data["pictures"][0].update(png="AAAA"),
        lambda data: data.update(ceilings=3),
    ],
)
def test_an_experiment_that_cannot_be_shown_is_named_on_the_page_beside_the_others(tmp_path, change):
    path = _damage(tmp_path, change)
    write_all(tmp_path)
    page = Page(render(read_folder(tmp_path), History(None))[0])
    assert f"{path.name}its contents are not an experiment's" in page.text
    assert "A made experiment" not in page.text
    assert page.errors == []


def test_seeds_that_differ_between_rows_stand_in_them(tmp_path):
    rows = [Outcome({"code": code}, {"steps": dict.fromkeys(seeds, 349.0)}, ["a=b"]) for code, seeds in SEEDS.items()]
    floor = Outcome({"code": "floor"}, {"steps": {0: 1.5}})
    part = PartResult("p", "A part", "Why?", [*rows, floor]).__dict__ | {"rows": [r.to_dict() for r in (*rows, floor)]}
    table = part_table(part)
    assert table.header == ("code", "seeds", "steps")
    assert table.rows == [["a", "0, 1, 2", "349"], ["b", "0, 2", "349"], ["floor", "", "1.500"]]
    assert table.text == 2
    assert table.caption == "A part. Why? Mean ± standard deviation, seeds 0 and 2 or seeds 0, 1 and 2."


def test_rows_without_settings_are_of_no_seeds():
    part = PartResult("p", "A part", "Why?", [Outcome({"code": "floor"}, {"steps": {0: 1.5}})])
    table = part_table(part.__dict__ | {"rows": [row.to_dict() for row in part.rows]})
    assert table.caption == "A part. Why? One run each."


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([180.0994, 180.1006], "180.1 ±0.0"),
        ([0.0469, 0.2129], "0.13 ±0.12"),
        ([1183.1, 1192.9], "1,188 ±7"),
        ([0.05, 0.07], "0.060 ±0.014"),
        ([-2e-11, 1e-11], "-5e-12 ±2.1e-11"),
        ([3.0, 3.0], "3"),
        ([0.25], "0.25"),
    ],
)
def test_a_mean_has_as_many_decimals_as_its_spread(values, shown):
    assert mean_and_spread(values) == shown


def test_a_picture_keeps_its_pixels_out_of_the_tables(tmp_path):
    _write(tmp_path)
    (path,) = tmp_path.glob("*.json")
    png = json.loads(path.read_text())["pictures"][0]["png"]
    text, _ = render(read_folder(tmp_path), History(None))
    assert png not in text
