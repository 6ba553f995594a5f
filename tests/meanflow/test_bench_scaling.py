from typing import Any

import pytest

from fullstride.bench.results import read_result
from fullstride.errors import ConfigError
from fullstride.meanflow import bench_scaling
from fullstride.meanflow.bench_scaling import run
from fullstride.meanflow.bench_scaling_options import Options, counts
from fullstride.meanflow.bench_scaling_steps import Measured
from fullstride.meanflow.bench_scaling_workers import Found
from tests.meanflow import quick_bench

quick = quick_bench.quick


def test_two_processes_beside_one_in_one_run(quick, tmp_path, capsys):
    chosen: dict[str, Any] = {
        "device": "cpu",
        "precision": "fp32",
        "backend": "eager",
        "models": ("dit_tiny",),
        "ratios": (0.5,),
    }
    result = read_result(run(Options(**chosen, kinds=("fsdp",), batch_size=2, averages=1), tmp_path))
    alone, shared = result["rows"]
    assert (alone["extra"]["processes"], shared["extra"]["processes"]) == (1, 2)
    assert alone["extra"]["efficiency"] == 1
    times = alone["timing"]["median_ms"], shared["timing"]["median_ms"]
    assert shared["extra"]["efficiency"] == pytest.approx(times[0] / times[1])
    assert shared["extra"]["buckets"] >= 1
    assert shared["extra"]["transfer_ms"] > 0
    assert len(shared["extra"]["own_median_ms"]) == 2
    assert 0 <= result["gate"]["dit_tiny, ratio 50%, fsdp"] < 1e-4
    assert result["conditions"]["left_out"] == []
    assert "dit_tiny, ratio 50%, 2 processes, fsdp" in capsys.readouterr().out


def test_rows_of_shares_have_a_share_of_the_floor(quick, monkeypatch, tmp_path):
    """A rise in time is told as an efficiency, and what failed is written and raised."""

    def measured(jobs, options, size, budget):
        rows = [Measured("none", 1, (10.0, 12.0, 11.0), 1.0, None), Measured("ddp", 2, (12.5, 13.75, 15.0), 1.0, None)]
        rows.append(Measured("fsdp", 2, (11.0,), 1.0, 2**30, {"transfer_ms": 0.5}))
        return [Found(jobs[0], rows, {"ddp": 0.25}), Found(jobs[1], [], {}, "it broke")]

    monkeypatch.setattr(bench_scaling, "run_sets", measured)
    options = Options("cpu", "fp32", "eager", models=("dit_tiny",), ratios=(1.0, 0.0), batch_size=3)
    with pytest.raises(bench_scaling.GateError, match="dit_tiny, ratio 0%: it broke"):
        run(options, tmp_path)
    (path,) = tmp_path.glob("meanflow-scaling--dit_tiny--fp32--eager--*.json")
    result = read_result(path)
    alone, ddp, fsdp = result["rows"]
    assert ddp["extra"]["efficiency"] == pytest.approx(11 / 13.75)
    assert alone["floor"] == ddp["floor"]
    assert fsdp["floor"]["memory_ms"] == pytest.approx(alone["floor"]["memory_ms"] * (3 + 14 / 2) / 17)
    assert result["conditions"]["left_out"] == [{"name": "dit_tiny, ratio 0%", "why": "it broke"}]


def test_numbers_of_processes_and_impossible_requests():
    assert counts(1) == (1,)
    assert counts(4) == (1, 2, 4)
    assert counts(6) == (1, 2, 4, 6)
    wrong: list[dict[str, Any]] = [{"kinds": ("dpp",)}, {"models": ("unett",)}, {"ratios": (1.5,)}, {"averages": 9}]
    for changes in wrong:
        with pytest.raises(ConfigError, match="expected"):
            Options(**changes)
