"""Host time of ops: every op's chain is right and measured in every way, and a wrong derivative is not timed."""

import pytest
import torch

from benchmarks.cases.jvp import host
from benchmarks.cases.jvp.options import OPS, HostOptions
from benchmarks.harness.results import read_result
from fullstride.errors import ConfigError
from fullstride.measure.gate import GateError
from fullstride.measure.timing import TimingPlan

CPU = torch.device("cpu")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(host, "TimingPlan", lambda **_: TimingPlan(warmup=0, repeats=1, seconds=0))


def test_the_options_name_every_op():
    assert set(OPS) == set(host.OPS)


@pytest.mark.parametrize("name", OPS)
def test_gradients_of_a_chain_do_not_depend_on_the_derivative(name, seed):
    torch.manual_seed(seed)
    problem = host.Problem.draw(host.OPS[name], CPU, torch.float64)
    plain, ours = (problem.step(host.PASSES[who], False)() for who in ("torch", "jvp"))
    torch.testing.assert_close(ours, plain)
    assert problem.chain(problem.x).shape == problem.x.shape
    assert problem.error(host.PASSES["jvp"]) < 1e-12


@pytest.mark.usefixtures("quick")
def test_every_way_is_measured(tmp_path, capsys):
    path = host.run(HostOptions(device="cpu", precision="fp32", only=("add", "attention"), compiled=False), tmp_path)
    result = read_result(path)
    assert [row["name"] for row in result["rows"]] == [
        *(f"add, {who}, eager" for who in host.PASSES), "attention, torch, eager", "attention, jvp, eager",
    ]  # fmt: skip
    for row in result["rows"]:
        assert row["extra"]["call_us"] == pytest.approx(row["timing"]["median_ms"] / host.CALLS * 1e3)
    # PyTorch's fused attention has no derivative.
    (left_out,) = result["conditions"]["left_out"]
    assert (left_out["shape"], left_out["who"]) == ("attention", "torch.func.jvp")
    assert result["gate"].keys() == {"add", "attention"}
    assert "us a call" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_wrong_derivative_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setitem(host.PASSES, "jvp", lambda chain, x, t: (chain(x), t.clone()))
    with pytest.raises(GateError):
        host.run(HostOptions(device="cpu", precision="fp32", only=("silu",), compiled=False), tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="--only"):
        HostOptions(only=("sine",))
