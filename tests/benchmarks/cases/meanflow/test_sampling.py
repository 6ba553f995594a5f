from functools import partial

import pytest
import torch

from benchmarks.cases.meanflow import sampling as bench_sampling_run
from benchmarks.cases.meanflow.options import SamplingOptions as Options
from benchmarks.cases.meanflow.sampling import SET, STEPS, SamplingBench, run
from benchmarks.harness.results import read_result
from fullstride.errors import ConfigError
from fullstride.meanflow.sampling.graphed import WARM, GraphedNetwork
from fullstride.measure.gate import GateError
from tests.benchmarks.cases.meanflow.quick_bench import quick, setup
from tests.meanflow.sampling.test_graphed import Tape

__all__ = ["quick"]
pytestmark = pytest.mark.usefixtures("quick")


def test_every_row_stands_beside_the_floor_of_its_evaluations(tmp_path, capsys):
    result = read_result(run(Options("cpu", model="unet_tiny", batches=(1, 3)), tmp_path))
    batches = [f"{sampler} {steps}, batch {batch}" for batch in (1, 3) for sampler, steps in STEPS]
    sets = [f"meanflow {steps}, batch 3, a set of {3 * SET} images" for steps in (1, 2)]
    assert [row["name"] for row in result["rows"]] == [f"{name}, eager" for name in (*batches, *sets)]
    assert list(result["gate"]) == ["batch 1, eager", "batch 3, eager"]
    assert all(0 < error < 1e-4 for error in result["gate"].values())
    one = setup(model="unet_tiny")
    for row in result["rows"]:
        extra, ms = row["extra"], row["timing"]["median_ms"]
        assert extra["images_per_second"] == pytest.approx(extra["num"] / ms * 1e3)
        work, ceilings = extra["num"] * extra["steps"], result["ceilings"]
        assert row["floor"]["arithmetic_ms"] == pytest.approx(work * one.forward_flops / ceilings["flops"] * 1e3)
        read = work / extra["batch"] * one.weight_bytes
        assert row["floor"]["memory_ms"] == pytest.approx(read / ceilings["bytes"] * 1e3)
    assert "euler 10, batch 3, eager: " in capsys.readouterr().out


def test_recorded_networks_are_judged_and_timed_by_their_replays(monkeypatch):
    Tape.made = Tape.replayed = 0
    monkeypatch.setattr(bench_sampling_run, "GraphedNetwork", partial(GraphedNetwork, record=Tape))
    own = setup(model="unet_tiny")
    own.model.eval()
    bench = SamplingBench(own, Options("cpu", model="unet_tiny", batches=(2, 5), backends=("graph",)))
    bench.run()
    assert bench.left_out == {}
    assert Tape.made == 2
    # Every evaluation but the first two of each batch.
    gate, calls = 2 * (WARM + 1), 3  # a row: told apart by one, then measured by two
    rows = calls * (sum(steps for _, steps in STEPS))
    sets = calls * SET * (1 + 2)
    assert Tape.replayed == 2 * (gate + rows - WARM) + sets
    assert len(bench.rows) == 2 * len(STEPS) + 2


def test_wrong_images_are_not_timed(tmp_path, monkeypatch):
    right = bench_sampling_run.meanflow_sample

    def wrong(model, noise, *, steps):
        found = right(model, noise, steps=steps)
        if noise.dtype != torch.float64 and len(noise) == 3:
            found.images[-1] *= 1.01
        return found

    monkeypatch.setattr(bench_sampling_run, "meanflow_sample", wrong)
    with pytest.raises(GateError, match="batch 3, eager: GateError: batch 3, eager: relative error"):
        run(Options("cpu", model="dit_tiny", batches=(3, 2)), tmp_path)
    (written,) = tmp_path.iterdir()
    result = read_result(written)
    assert {row["extra"]["batch"] for row in result["rows"]} == {2}
    (left,) = result["conditions"]["left_out"]
    assert left["name"] == "batch 3, eager"


def test_what_there_is_no_time_for_is_named(tmp_path, capsys):
    with pytest.raises(ConfigError, match="no row was measured"):
        run(Options("cpu", model="dit_tiny", seconds=0.0), tmp_path)
    assert "left out: batch 1, eager: no time" in capsys.readouterr().out


def test_impossible_requests_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--backend=graph: CUDA graphs are CUDA's, the device is cpu"):
        run(Options("cpu", model="dit_tiny", backends=("graph",)), tmp_path)
    with pytest.raises(ConfigError, match="--backend=grahp: expected one of"):
        Options(backends=("grahp",))
    with pytest.raises(ConfigError, match="--batch-size: 4, 0, expected at least 1 each"):
        Options(batches=(4, 0))
