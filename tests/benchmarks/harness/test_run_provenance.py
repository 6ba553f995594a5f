import copy
import json
from typing import Any

import pytest

from benchmarks.harness import run_provenance as origins
from benchmarks.harness.code_digest import loaded
from benchmarks.harness.environment import environment
from benchmarks.harness.run_provenance import expect_here, of_run, of_runs
from benchmarks.report.frame import Source
from fullstride.errors import ConfigError


@pytest.fixture
def kept() -> dict[str, Any]:
    """Return the record of a run that was made on another machine."""
    found = of_run({})
    found["environments"][0] |= {
        "date": "2026-01-02T00:00:00+00:00",
        "commit": "a" * 40,
        "dirty": False,
        "cpu": "Other Processor",
        "cores": 96,
        "gpu": {"name": "NVIDIA H200", "memory_bytes": 1, "cuda": "13.0", "driver": "570.1"},
        "versions": {"torch": "2.11.0", "numpy": "2.1"},
    }
    return found


def with_(run: dict[str, Any], **changed: Any) -> dict[str, Any]:
    run = copy.deepcopy(run)
    run["environments"][-1] |= changed
    return run


def test_a_run_keeps_where_it_is_made_and_what_it_loaded():
    found = of_run({"code": {"fullstride/gone.py": "0" * 64}})
    assert found["code"] == loaded() | {"fullstride/gone.py": "0" * 64}
    (kept,), here = found["environments"], environment()
    assert {k: v for k, v in kept.items() if k != "date"} == {
        k: v for k, v in here.items() if k not in ("date", "command", "code")
    }
    assert json.loads(json.dumps(found)) == found


def test_a_run_keeps_one_environment_until_it_is_another(kept):
    first = of_run({})
    assert len(of_run(first)["environments"]) == 1
    both = of_run(kept)["environments"]
    assert both[0] == kept["environments"][0]
    assert len(both) == 2
    assert len(of_run({"environments": both})["environments"]) == 2


def test_the_environment_is_asked_for_once(monkeypatch):
    of_run({})
    monkeypatch.setattr(origins, "environment", lambda: pytest.fail("asked again"))
    assert of_run({})["environments"][0]["cpu"]


def test_a_result_is_of_the_machine_of_its_runs(kept, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/a/benchmarks/__main__.py", "phase2"])
    later = with_(kept, date="2026-01-03T00:00:00+00:00")
    found = of_runs([later, kept], "cuda")
    (expected,) = later["environments"]
    assert found.keys() == {"code", "command"} | expected.keys()
    assert {k: found[k] for k in expected} == expected
    assert found["command"].endswith("python -m benchmarks phase2")
    assert found["code"].items() >= kept["code"].items()


def test_commits_and_versions_that_differ_stand_beside_each_other(kept):
    versions = {"torch": "2.12.0", "numpy": "2.1", "triton": "3.6.0"}
    later = with_(kept, date="2026-01-03T00:00:00+00:00", commit="b" * 40, versions=versions)
    found = of_runs([later, with_(kept, dirty=True)], "cuda")
    assert found["versions"] == {"torch": "2.11.0, 2.12.0", "numpy": "2.1", "triton": "3.6.0"}
    assert found["commits"] == ["aaaaaaa+", "bbbbbbb"]
    assert Source("r.json", {"environment": found}).origin().endswith("commit aaaaaaa+, bbbbbbb, 2026-01-03")
    unknown = of_runs([kept, with_(later, commit=None, dirty=None)], "cuda")
    assert Source("r.json", {"environment": unknown}).origin().endswith("commit aaaaaaa, unknown, 2026-01-03")


def test_runs_that_kept_none_are_of_this_machine():
    code = {"fullstride/gone.py": "0" * 64}
    found = of_runs([{"code": code}, {}], "cpu")
    assert found["cpu"] == environment()["cpu"]
    assert found["code"].items() >= code.items()


def test_runs_of_which_some_kept_none_are_refused(kept):
    with pytest.raises(ConfigError, match="1 of 2 runs do not record their machine, expected all or none"):
        of_runs([kept, {"code": {}}], "cuda")


def test_runs_of_different_machines_are_refused(kept):
    other = with_(kept, gpu={"name": "NVIDIA H100"})
    with pytest.raises(ConfigError, match="nvidia-h100 and nvidia-h200, expected one kind"):
        of_runs([kept, other], "cuda")
    assert of_runs([kept, other], "cpu")["cpu"] == "Other Processor"


def test_a_process_is_refused_before_it_adds_to_runs_of_another_machine(kept):
    with pytest.raises(ConfigError, match="other-96-cores, expected one kind"):
        expect_here([of_run({}), kept], "cpu")
    expect_here([of_run({}), {}], "cpu")
    expect_here([], "cpu")
