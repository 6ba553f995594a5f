import pytest
import torch

from fullstride.bench.gate import GateError
from fullstride.bench.results import read_result
from fullstride.bench.timing import HostClock, Plan
from fullstride.meanflow import bench_step
from fullstride.meanflow.bench_step import gate, make_setup, run

ROWS = [
    "forward, no grad",
    "FM MSE step",
    "MeanFlow 0% step",
    "MeanFlow 25% step",
    "MeanFlow 100% step",
    "JVP target alone",
]


@pytest.fixture
def quick(monkeypatch):
    """One call a row and ceilings of little work: what is tested is not the times."""
    monkeypatch.setattr(bench_step, "Plan", lambda **_: Plan(warmup=0, repeats=1, seconds=0.0))
    monkeypatch.setattr("fullstride.bench.floor.GEMM_SIZE", {"cpu": 64})
    monkeypatch.setattr("fullstride.bench.floor.COPY_BYTES", {"cpu": 1 << 16})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_six_rows_are_measured_beside_their_floors(quick, tmp_path, capsys, precision):
    path = run(device="cpu", batch_size=9, precision=precision, backend="eager", model="unet_tiny", out=tmp_path)
    result = read_result(path)
    assert [row["name"] for row in result["rows"]] == ROWS
    floors = [row["floor"]["arithmetic_ms"] for row in result["rows"]]
    ratios = [f / floors[0] for f in floors]
    assert ratios == pytest.approx([1, 3, 3, 3.25, 4, 2])
    assert result["rows"][1]["extra"]["over_flow_matching"] == 1
    assert all(row["timing"]["median_ms"] > 0 for row in result["rows"])
    assert 0 < result["gate"]["gradients"] < bench_step.TOLERANCE[precision]
    assert "MeanFlow over flow matching" in capsys.readouterr().out


def test_a_wrong_step_is_not_timed():
    setup = make_setup("cpu", "fp32", "eager", "unet_tiny")
    right = bench_step._meanflow(setup, 1.0)
    x = setup.images(11)
    assert gate(setup, right, x, HostClock()).errors["gradients"] < 1e-4
    with pytest.raises(GateError, match="loss: relative error"):
        gate(setup, lambda *batch: 1.1 * right(*batch), x, HostClock())
    with pytest.raises(GateError, match="gradients: relative error"):
        gate(
            setup, lambda *batch: right(*batch).detach() + 0.9 * (r := right(*batch)) - 0.9 * r.detach(), x, HostClock()
        )


def test_no_weight_of_the_timed_network_is_zero():
    setup = make_setup("cpu", "fp32", "eager", "unet_tiny")
    assert all(p.detach().any() for p in setup.model.parameters() if p.ndim > 1)


def test_the_gate_judges_a_batch_of_any_size_in_chunks(monkeypatch):
    setup = make_setup("cpu", "fp32", "eager", "unet_tiny")
    x = setup.images(7)
    drawn = setup.loss(1.0).draw(x)
    whole, _ = bench_step._fp64_loss(setup, x, *drawn)
    monkeypatch.setattr(bench_step, "GATE_CHUNK", 3)
    parts, _ = bench_step._fp64_loss(setup, x, *drawn)
    torch.testing.assert_close(parts, whole)
