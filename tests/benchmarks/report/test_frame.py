import json
import re
from typing import Any

import pytest

from benchmarks.report.frame import Source, read_results
from fullstride.errors import ConfigError
from tests.benchmarks.report.made import SEED, made, write_all, write_parts, write_rows
from tests.benchmarks.report.made import row as made_row


def test_an_empty_folder_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=rf"{re.escape(str(tmp_path))}: found no \*.json; run `python -m benchmarks"):
        read_results(tmp_path)


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
        (_broken(lambda data: data["rows"][0].update(floor=None)), "incomplete"),
        (_broken(lambda data: data.update(rows=[])), "no rows"),
        (_broken(lambda data: data.update(rows=["x"])), "incomplete"),
        (_broken(lambda data: data.update(conditions=[1])), "conditions is of type list, expected dict"),
        (_broken(lambda data: data.update(environment=None)), "environment is of type NoneType, expected dict"),
        (_broken(lambda data: data.pop("environment")), "environment missing"),
        (_broken(lambda data: data["rows"][0]["timing"].update(median_ms="1.5")), "'1.5' is not a number"),
        (_broken(lambda data: data["rows"][0].update(over_floor=float("nan"))), "nan is not finite"),
        (_broken(lambda data: data["rows"][0].update(over_floor=8)).replace(": 8,", ": 1e999,"), "inf is not finite"),
    ],
)
def test_a_broken_file_is_named(tmp_path, text, why):
    write_all(tmp_path)
    path = tmp_path / "m-broken.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}: .*{why}"):
        read_results(tmp_path)


def test_every_measurement_is_a_row_with_the_numbers_of_its_json(tmp_path):
    results = {result.file_name: result for result in write_all(tmp_path)}
    frame = read_results(tmp_path).frame
    times = frame[frame.metric == "ms"]
    assert len(times) == sum(len(result.rows) for result in results.values())
    every: list[Any] = list(times.itertuples())
    for found in every:
        row = next(row for row in results[found.file].rows if row.name == found.row)
        assert found.median == row.timing.median_ms, f"seed {SEED}"
        assert (found.p10, found.p90) == (row.timing.quantile(0.1), row.timing.quantile(0.9))
        assert (found.bound, found.over) == (row.floor.ms, row.over_floor)
        assert found.case == results[found.file].case
        assert (found.machine, found.date) in (("NVIDIA H200", "2031-02-03"), ("AMD EPYC, 2 cores", "2031-02-03"))
    ours = times[(times.case == "jvp-attention") & (times.who == "ours")]
    assert set(ours["kind"]) == {"forward", "through"}
    assert frame[frame.why.notna()].why.tolist() == ["no memory"]


def test_objects_in_a_row_are_columns_by_both_names(tmp_path):
    row = made_row("a", over={"ratio": 2.5, "interval": [2.0, 3.0]}, samples=[1.0, 2.0])
    frame = write_rows(tmp_path, "train-step", [row], section="host").frame
    assert frame[["over_ratio", "over_low", "over_high", "at_section"]].values.tolist() == [[2.5, 2.0, 3.0, "host"]]
    assert "samples" not in frame


def test_metrics_and_claims_of_an_experiment_and_objects_of_other_files_are_rows(tmp_path):
    from benchmarks.harness.seeds import Outcome

    write_parts(tmp_path, "phase2", {"overfit": [Outcome({"training": "a"}, {"distance": {0: 1.0, 2: 2.0}})]})
    other = {"what": "x", "steps": 3, "runs": {"a": {"ms": 1.5, "score": {"right": 0.5}, "all": [1]}, "b": {"ms": 2.5}}}
    (tmp_path / "other.json").write_text(json.dumps(other))
    results = read_results(tmp_path)
    rows: list[Any] = list(results.of("experiment-phase2--gpu--a-gpu.json").itertuples())
    (metric,) = rows
    assert (metric.part, metric.training, metric.metric, metric.median) == ("overfit", "a", "distance", 1.5)
    assert metric.seeds == {0: 1.0, 2: 2.0}
    found = results.of("other.json").set_index("path")
    assert found.ms["runs, a"] == 1.5
    assert found.score_right["runs, a"] == 0.5
    assert set(found.index) == {"", "runs", "runs, a"}
    assert found.b_ms["runs"] == 2.5  # one that has scalars alone is part of what it lies in


def test_the_newest_whole_file_of_a_name_is_taken(tmp_path):
    from benchmarks.harness.budget import NO_TIME

    for day, gpu in ((2, "GPU A"), (3, "GPU B")):
        write_rows(tmp_path, "llm", [made_row("a")], gpu=gpu, date=f"2026-11-{day:02}T00:00:00+00:00", model="m")
    cut = [{"name": "b", "why": NO_TIME}]
    results = write_rows(tmp_path, "llm", [made_row("a")], gpu="GPU C", date="2026-11-09", model="m", left_out=cut)
    assert results.newest("llm--m--*") == "llm--m--gpu-b.json"
    assert results.newest("llm--m[--more]--*") == "llm--m--gpu-b.json"
    assert results.newest("llm--m--*", "gpu-a") == "llm--m--gpu-a.json"
    with pytest.raises(ConfigError, match=r"no result llm--\*\.json; measure the case again"):
        results.newest("llm--*")  # a part that is not named is another kind of result


@pytest.mark.parametrize("damage", [3, "torch", ["torch"]])
def test_what_is_recorded_as_another_kind_is_as_if_not_recorded(damage):
    source = Source("a.json", {"environment": dict.fromkeys(("versions", "code"), damage)})
    assert source.origin() == ""
    assert source.recorded("code", dict) is None


def test_what_is_no_result_is_told_apart(tmp_path):
    write_all(tmp_path)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "next.json").write_text('{"schema": 2}')
    (tmp_path / "other.json").write_text('{"steps": 3}')
    (tmp_path / "notes.txt").write_text("no JSON")
    results = read_results(tmp_path)
    assert [name for name, source in results.sources.items() if source.kind == "other"] == ["other.json"]
    assert results.unread == {"list.json": "a JSON list, expected an object", "next.json": "schema 2, expected 1"}


def test_a_run_on_a_cpu_beside_an_idle_gpu_is_of_the_cpu():
    environment = {"gpu": {"name": "NVIDIA H200"}, "cpu": "Xeon", "cores": 4}
    assert Source("demo.json", {"environment": environment, "config": {"device": "cpu"}}).machine == "Xeon, 4 cores"
    assert Source("demo.json", {"environment": environment, "config": {"device": "cuda"}}).machine == "NVIDIA H200"
    assert Source("demo.json", {"environment": environment}).machine == "NVIDIA H200"
