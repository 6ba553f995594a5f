import json
import time

import pytest

from benchmarks.harness.budget import NO_MEMORY, NO_TIME
from benchmarks.harness.environment import BEGAN, environment
from benchmarks.harness.results import SCHEMA, Row, at, read_result, write_result
from fullstride.errors import ConfigError
from tests.benchmarks.harness.made import ROWS, made_result


def test_a_result_reads_back_as_it_was_written(tmp_path):
    result = made_result(environment=environment())
    path = write_result(result, tmp_path / "new" / "folder")
    assert json.dumps(read_result(path), indent=1) + "\n" == path.read_text()
    read = read_result(path)
    assert read["environment"].pop("seconds") == pytest.approx(time.monotonic() - BEGAN, abs=1)
    assert read == result.to_dict()
    assert read["schema"] == SCHEMA


def test_raw_samples_and_the_summary_of_each_row_are_kept(tmp_path):
    rows = read_result(write_result(made_result(), tmp_path))["rows"]
    assert [row["name"] for row in rows] == ["forward, no grad", "MeanFlow 25% step"]
    assert rows[0]["timing"]["samples_ms"] == [4.0, 2.0, 3.0]
    assert rows[0]["timing"]["median_ms"] == 3.0
    assert rows[0]["over_floor"] == 3.0 / 1.5
    assert rows[1]["timing"]["samples_ms"] == [1 / 3, 0.1, 12.75]
    assert rows[1]["floor"]["bound"] == "memory"
    assert rows[1]["extra"] == {"ratio": 0.25}


def test_one_file_a_case_and_machine(tmp_path):
    path = write_result(made_result(), tmp_path)
    assert path.name == "meanflow-step--unet--bf16--eager--amd-epyc-2-cores.json"
    again = write_result(made_result(rows=ROWS[:1]), tmp_path)
    assert again == path
    assert len(read_result(path)["rows"]) == 1
    with pytest.raises(ConfigError, match=f"meanflow-step: no row was measured, expected one; {path} was not written"):
        write_result(made_result(rows=[]), tmp_path)
    assert len(read_result(path)["rows"]) == 1
    # Nothing half-written stays beside it.
    assert list(tmp_path.iterdir()) == [path]
    other = made_result(conditions={"model": "unet", "precision": "fp32"})
    assert write_result(other, tmp_path).name == "meanflow-step--unet--fp32--amd-epyc-2-cores.json"


def test_what_was_cut_short_takes_no_whole_ones_place(tmp_path):
    conditions = made_result().conditions
    left_out = [{"name": "FM MSE", "why": NO_MEMORY}]
    whole = write_result(made_result(conditions=conditions | {"left_out": left_out}), tmp_path)
    left_out = [*left_out, {"name": "MeanFlow 0%", "why": NO_TIME}]
    short = write_result(made_result(rows=ROWS[:1], conditions=conditions | {"left_out": left_out}), tmp_path)
    assert whole.name == "meanflow-step--unet--bf16--eager--amd-epyc-2-cores.json"
    assert short.name == "meanflow-step--unet--bf16--eager--cut-short--amd-epyc-2-cores.json"
    assert (len(read_result(whole)["rows"]), len(read_result(short)["rows"])) == (len(ROWS), 1)


@pytest.mark.parametrize(("schema", "shown"), [(SCHEMA - 1, "0"), (SCHEMA + 1, "2"), ("1", "'1'")])
def test_another_schema_is_refused(tmp_path, schema, shown):
    path = write_result(made_result(), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": schema}))
    with pytest.raises(ValueError, match=rf"amd-epyc.*: schema {shown}, expected {SCHEMA}; measure the case again"):
        read_result(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"rows": []}', "schema None, expected"),
        ("[1, 2]", "schema None, expected"),
        ('{"schema": 1, "ro', "not JSON .*measure the case again"),
        (
            f'{{"schema": {SCHEMA}, "case": "a", "device": "cpu"}}',
            "conditions, gate, environment, ceilings, rows missing",
        ),
    ],
    ids=["no schema", "a list", "cut off", "not whole"],
)
def test_what_is_no_result_is_refused(tmp_path, text, message):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"other\.json: {message}"):
        read_result(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.json: no such file"):
        read_result(tmp_path / "gone.json")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), object()], ids=["nan", "inf", "object"])
def test_what_json_cannot_say_leaves_the_older_file_alone(tmp_path, bad):
    path = write_result(made_result(), tmp_path)
    before = path.read_bytes()
    with pytest.raises((ValueError, TypeError), match="JSON"):
        write_result(made_result(rows=[Row("bad", ROWS[0].timing, ROWS[0].floor, {"value": bad})]), tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_other_settings_than_the_usual_ones_have_a_file_of_their_own():
    assert at(batch=(64, 64), kinds=(("ddp", "fsdp"), ("ddp", "fsdp")), dropout=(False, False)) == {}
    other = at(batch=(256, 64), ratios=((0.5, 1.0), (1.0,)), averages=(3, 3), dropout=(True, False))
    assert other == {"at": "batch-256-ratios-0-5-1-0-dropout"}
