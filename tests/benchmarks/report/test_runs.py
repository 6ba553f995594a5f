import json

import pytest
from typer.testing import CliRunner

from benchmarks.cli.app import app
from benchmarks.report.runs import MOST, drawings, folders, read_curves, write_runs
from fullstride.errors import ConfigError
from tests.benchmarks.report.made import RANDOM
from tests.benchmarks.report.markup import FETCHING, Page, addresses


def _run(folder, *, steps=6, more=None):
    folder.mkdir(parents=True)
    lines = [
        {"step": 10 * i, "epoch": i, "images": i, "loss": 100 / i, "evaluation": {"score": {"energy_distance": 1 / i}}}
        for i in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line | (more or {})) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({"data": {"name": "digits"}, "model": {"name": "unet_tiny"}}))
    return folder


def _values(found, name, run):
    rows = found[(found.name == name) & (found.run == run)]
    return dict(zip(rows.step, rows.value, strict=True))


def test_curves_have_the_numbers_of_the_runs(tmp_path):
    _run(tmp_path / "a")
    _run(tmp_path / "b", steps=3, more={"b": True, "c": "x", "d": None, "e": [1], "h": float("inf")})
    found = read_curves(folders([tmp_path]))
    assert _values(found, "loss", "a") == {10.0 * i: 100 / i for i in range(1, 7)}
    assert _values(found, "evaluation score energy_distance", "b") == {10.0 * i: 1 / i for i in range(1, 4)}
    assert set(found.name) == {"loss", "evaluation score energy_distance"}  # what is no number is left


def test_the_page_draws_them_and_fetches_nothing(tmp_path):
    steps = RANDOM.randrange(2, 9)
    _run(tmp_path / "a", steps=steps)
    _run(tmp_path / "b")
    told = CliRunner().invoke(app, ["report", "runs", str(tmp_path), "--out", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    assert "2 runs" in told.output
    text = (tmp_path / "out" / "index.html").read_text()
    page = Page(text)
    assert page.errors == []
    assert not page.tags & FETCHING
    assert addresses(text) == set()
    assert [figure["label"].partition(" by ")[0] for figure in page.figures] == [
        "loss",
        "evaluation score energy_distance",
    ]
    assert page.tables[0][1][:3] == ["a", f"{10 * steps}", f"{100 / steps:.4g}"]


def test_a_run_whose_name_begins_with_an_underscore_is_in_the_legend(tmp_path):
    _run(tmp_path / "_x")
    _run(tmp_path / "b")
    figures, _ = drawings(read_curves(folders([tmp_path])))
    for drawn in figures:
        assert [text.get_text() for text in drawn.figure.legends[0].get_texts()] == ["_x", "b"]


def test_more_than_fits_is_named(tmp_path):
    many = {f"number_{i}": {"x": float(i)} for i in range(20)}
    page, _ = write_runs([_run(tmp_path / "a", more=many)], tmp_path / "out")
    text = Page(page.read_text()).text
    assert len(Page(page.read_text()).figures) == MOST
    assert "Not drawn: number_10 x" in text


def test_what_cannot_be_drawn_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl here or one folder below"):
        folders([tmp_path])
    with pytest.raises(ConfigError, match="written at two steps"):
        write_runs([_run(tmp_path / "short", steps=1)], tmp_path / "out")
    broken = _run(tmp_path / "broken")
    file = broken / "metrics.jsonl"
    whole = read_curves(folders([broken]))
    file.write_text(file.read_text() + '{"step": ')
    assert read_curves(folders([broken])).equals(whole)  # it is being written
    file.write_text(file.read_text() + "\n")
    with pytest.raises(ConfigError, match="a line is incomplete"):
        read_curves(folders([broken]))


@pytest.mark.parametrize("line", ["3", '"step"', '{"step": null}', '{"step": "x"}'])
def test_a_line_of_something_else_is_named(tmp_path, line):
    file = _run(tmp_path / "a") / "metrics.jsonl"
    file.write_text(f"{line}\n{file.read_text()}")
    with pytest.raises(ConfigError, match=r"metrics.jsonl: a line is incomplete"):
        read_curves(folders([tmp_path / "a"]))
