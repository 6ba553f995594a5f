from functools import partial

import jax
import numpy as np
import pytest

from benchmarks.cases.step_jax import train_step as bench_train_step
from benchmarks.cases.step_jax.host import gated, law, started
from benchmarks.cases.step_jax.nnx_ways import NNX_WAYS, nnx_tree
from benchmarks.cases.step_jax.options import TrainStepOptions
from benchmarks.cases.step_jax.real import step_times
from benchmarks.cases.step_jax.train_step import run
from benchmarks.cases.step_jax.ways import BARE, FLAT
from benchmarks.cases.step_jax.workload import LAYERS, busy, tower, tree
from benchmarks.harness.results import read_result
from fullstride.measure.roofline import Ceilings


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(bench_train_step, "jax_ceilings", lambda *_: Ceilings(1e9, 1e9, "none", 1, [1.0], [1.0]))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _unused(*_):
    raise AssertionError("these sections have trees of their own")


def test_a_line_is_found_over_orders_of_magnitude():
    leaves = [19, 61, 199, 601, 1981, 4981]
    fit = law(leaves, [0.05 + 0.0123 * n for n in leaves])
    np.testing.assert_allclose([fit["us_per_array"], fit["ms_at_none"]], [12.3, 0.05], rtol=1e-9)
    assert fit["worst"] < 1e-9
    assert law(leaves, [0.05 + 1e-6 * n**2 for n in leaves])["worst"] > 0.3


@pytest.mark.thorough
def test_the_sections_of_the_law_and_of_the_saving(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_train_step, "TOWERS", (1, 2))
    monkeypatch.setattr(bench_train_step, "WORK", (1,))
    monkeypatch.setattr(bench_train_step, "product_ms", lambda: 1.0)
    monkeypatch.setitem(LAYERS, "tiny", 0)
    monkeypatch.setattr(bench_train_step, "step_times", partial(step_times, least=1))
    asked = {"model": "tiny", "calls": 10, "only": ("=TrainStep", "=filter_jit"), "seconds": 60.0}
    fitted, saving = (
        read_result(run(TrainStepOptions((section,), **asked), _unused, tmp_path)[0]) for section in ("law", "saving")
    )
    assert fitted["conditions"]["fits"].keys() == {FLAT, "TrainStep", "filter_jit"}
    assert {row["extra"]["arrays"] for row in fitted["rows"]} == {13, 19}
    assert {row["name"] for row in saving["rows"]} == {f"{name}, 1 ms" for name in (BARE, "TrainStep", "filter_jit")}
    assert saving["conditions"]["savings"]["filter_jit, 1 ms"] == 0
    out = capsys.readouterr().out
    assert "us an array" in out
    assert "of filter_jit's loop saved" in out
    assert len(tower(829).arrays()) == 4981
    workload = busy(tree("tiny"), 3)
    assert float(workload.loss_fn(workload.model(), workload.batch, workload.key)) == pytest.approx(
        float(tree("tiny").loss_fn(workload.model(), workload.batch, workload.key))
    )


def test_every_way_of_flax_trains_alike(monkeypatch):
    pytest.importorskip("flax")
    monkeypatch.setitem(LAYERS, "tiny", 0)
    names = (FLAT, *NNX_WAYS, "TrainStep", "TrainStep grouped")
    ways, _ = started(nnx_tree("tiny"), names)
    assert set(gated(nnx_tree("tiny"), ways, 1e-5)) == set(names)
    assert len(ways[FLAT].params()) == 13
