import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks.tuning import attention_backward, attention_forward, norms, tuner


@pytest.fixture
def given(monkeypatch, tmp_path):
    def give(*words: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["tuner", "--out", str(tmp_path / "out.json"), *words])
        tuner.main("about", "some.module", ["a b", "a c", "b a"], calls_of, lambda case: {"of": case})
        return json.loads((tmp_path / "out.json").read_text()) if (tmp_path / "out.json").is_file() else {}

    called: list[str] = []

    def calls_of(case: str) -> list:
        return [lambda name=name: called.append(f"{case} {name}") for name in (1, 2, 3)]

    return give, called


def test_cases_by_parts_of_their_names_are_compiled_ahead_tuned_and_written(given, monkeypatch):
    give, called = given
    started: list[list[str]] = []
    process = SimpleNamespace(wait=lambda: 0)
    monkeypatch.setattr(tuner.subprocess, "Popen", lambda command: started.append(command) or process)
    monkeypatch.setattr(tuner, "environment", dict)
    found = give("--only", "a,b", "--jobs", "2")
    assert found["cases"] == {"a b": {"of": "a b"}, "b a": {"of": "b a"}}
    assert [command[1:3] for command in started] == [["-m", "some.module"]] * 2
    assert [command[-2:] for command in started] == [["--share", "0"], ["--share", "1"]]
    assert called == []


def test_a_share_makes_every_so_manyth_call_and_writes_nothing(given):
    give, called = given
    assert give("--only", "a,b", "--jobs", "4", "--share", "1") == {}
    assert called == ["a b 2", "b a 3"]


def test_rows_that_were_not_timed_come_last():
    rows = [{"refused": "wrong"}, {"ms": 2.0}, {"ms": 1.0}]
    assert tuner.fastest_first(rows) == [rows[2], rows[1], rows[0]]


def test_candidates_are_distinct_and_the_tables_launch_of_a_norm_is_the_first():
    for case in norms.CASES.values():
        found = case.candidates()
        assert len(set(found)) == len(found)
    rows = next(case for case in norms.CASES.values() if case.op == "layer_norm")
    assert rows.candidates()[0] == norms.row_configs.row_config(rows.work, rows.shape[-1], False)
    assert len(set(attention_forward.candidates(64))) == 44
    for case, (*_, through) in attention_backward.CASES.items():
        launches = attention_backward.candidates(case)
        assert {of for ways in attention_backward.WAYS[through] for way in ways for of in way} == set(launches)
        assert all(launch.of == of for of, found in launches.items() for launch in found)
