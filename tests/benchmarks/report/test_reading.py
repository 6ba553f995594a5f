import json
import re
import sys

import pytest
from typer.testing import CliRunner

from benchmarks.cli.app import app
from benchmarks.report.reading import UNKNOWN, Result, Source, marked, read_folder
from fullstride.errors import ConfigError
from tests.benchmarks.report.made import made, write_all


def test_an_empty_folder_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=rf"{re.escape(str(tmp_path))}: no \*.json there; run `python -m benchmarks"):
        read_folder(tmp_path)


def _broken(change) -> str:
    data = made("llm").to_dict()
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"schema": 1, "case"', "not JSON"),
        ("", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ('{"schema": 1, "case": "llm"}', "missing"),
        (_broken(lambda data: data["rows"][0].pop("timing")), "'timing'"),
        (_broken(lambda data: data["rows"][0].update(floor=None)), "not whole"),
        (_broken(lambda data: data.update(rows=[])), "no rows"),
        (_broken(lambda data: data.update(rows=["x"])), "not whole"),
        (_broken(lambda data: data.update(conditions=[1])), "conditions is of type list, expected dict"),
        (_broken(lambda data: data.update(case=["llm"])), "case is of type list, expected str"),
        (_broken(lambda data: data.update(environment=None)), "environment is of type NoneType, expected dict"),
        (_broken(lambda data: data.pop("environment")), "environment missing"),
        (_broken(lambda data: data["rows"][0]["timing"].update(median_ms="1.5")), "'1.5' is no number"),
        (_broken(lambda data: data["rows"][0].update(over_floor=float("nan"))), "NaN, which JSON does not have"),
        (_broken(lambda data: data["rows"][0].update(over_floor=8)).replace(": 8,", ": 1e999,"), "inf is not finite"),
    ],
)
def test_a_broken_file_is_named(tmp_path, text, why):
    write_all(tmp_path)
    path = tmp_path / "m-broken.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}: .*{why}"):
        read_folder(tmp_path)


@pytest.mark.parametrize("damage", [3, "torch", ["torch"]])
def test_versions_commit_and_command_of_another_kind_are_as_if_not_recorded(damage):
    source = Source("a.json", {"environment": dict.fromkeys(("versions", "commit", "commits", "command"), damage)})
    assert source.versions() == UNKNOWN
    if damage != "torch":
        assert (source.commit, source.command) == (None, None)


def test_what_is_no_result_is_told_apart(tmp_path):
    write_all(tmp_path)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "next.json").write_text('{"schema": 2}')
    (tmp_path / "other.json").write_text('{"steps": 3}')
    (tmp_path / "notes.txt").write_text("no JSON")
    folder = read_folder(tmp_path)
    assert [source.name for source in folder.others] == ["other.json"]
    assert folder.unread == (
        ("list.json", "a JSON list, expected an object"),
        ("next.json", "schema 2, expected 1"),
    )


def test_a_run_on_a_cpu_beside_an_idle_gpu_is_of_the_cpu():
    environment = {"gpu": {"name": "NVIDIA H200"}, "cpu": "Xeon", "cores": 4}
    assert Source("demo.json", {"environment": environment, "config": {"device": "cpu"}}).machine == "Xeon, 4 cores"
    assert Source("demo.json", {"environment": environment, "config": {"device": "cuda"}}).machine == "NVIDIA H200"
    assert Source("demo.json", {"environment": environment}).machine == "NVIDIA H200"


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path, monkeypatch, package):
    write_all(tmp_path)
    for module in [name for name in sys.modules if name.startswith("benchmarks.report.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    done = CliRunner().invoke(app, ["report", "--results", str(tmp_path), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert f"{package} is not installed; run, from the root of a clone: pip install '.[torch]'" in done.output


@pytest.mark.parametrize(
    ("gpus", "marks"),
    [
        (("NVIDIA H100 80GB HBM3", "NVIDIA H200"), [" (H100)", " (H200)"]),
        (("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"), [" (H100 80GB HBM3)", " (H100 PCIe)"]),
        (("NVIDIA H200", "NVIDIA H200"), ["", ""]),
    ],
)
def test_a_gpu_is_marked_by_no_more_than_tells_it_apart(gpus, marks):
    results = [Result("a.json", {"device": "cuda", "environment": {"gpu": {"name": gpu}}}) for gpu in gpus]
    mark = marked(results)
    assert [mark(result) for result in results] == marks
