import pytest
import torch

from benchmarks.cases.meanflow import step_sections as bench_step_alternatives
from benchmarks.cases.meanflow.step_cases import StepCase
from benchmarks.cases.meanflow.step_run import StepBench
from benchmarks.cases.meanflow.step_sections import CapturedJvp, alternatives, cases_of, split, torch_jvp, two_vjps
from tests.benchmarks.cases.meanflow.quick_bench import bench, quick  # noqa: F401
from tests.meanflow.fields import batch_of_points
from tests.meanflow.objective.test_derivative import central_difference, random_unet

pytestmark = pytest.mark.usefixtures("quick")


class Again:
    """Stand-in for a CUDA graph."""

    def __init__(self, function, generator):
        self.replay = function


@pytest.mark.parametrize("way", [torch_jvp, two_vjps, split, CapturedJvp()])
def test_every_way_gives_the_prediction_and_its_derivative(monkeypatch, way, seed):
    monkeypatch.setattr(bench_step_alternatives, "CudaGraph", Again)
    net = random_unet(seed)
    for batch in (4, 4):  # recorded, then replayed
        z, v, t, r = batch_of_points(seed + batch, batch=batch, shape=(3, 6, 6))
        way = CapturedJvp() if isinstance(way, CapturedJvp) else way
        u, dudt = way(net, z, r, t, v)
        torch.testing.assert_close(u, net(z, r, t), rtol=1e-10, atol=1e-10)
        expected = central_difference(net, z, r, t, v)
        assert (dudt - expected).norm() < 1e-7 * expected.norm()
        assert not dudt.requires_grad
        assert torch.autograd.grad(u.sum(), next(net.parameters()))[0].any()


def test_a_captured_derivative_follows_its_inputs(monkeypatch):
    monkeypatch.setattr(bench_step_alternatives, "CudaGraph", Again)
    net, way = random_unet(0), CapturedJvp()
    for seed in (1, 2):
        z, v, t, r = batch_of_points(seed, shape=(3, 6, 6))
        expected = central_difference(net, z, r, t, v)
        assert (way(net, z, r, t, v)[1] - expected).norm() < 1e-7 * expected.norm()


def test_the_loss_is_compiled_in_each_mode_that_has_a_row_and_is_the_same_loss(monkeypatch):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda function, *, mode, **_: modes.append(mode) or function)
    setup = bench(batch_size=4).setup
    both = [*alternatives(setup), *cases_of("autotune", setup)]
    cases = [case for case in both if isinstance(case, StepCase) and case.name.startswith("A2")]
    drawn = setup.drawn(setup.loss(1.0), setup.images(4))
    found = [case.make(setup, case.loss)(setup.model, drawn) for case in cases]
    assert [case.name.rpartition(" ")[2] for case in cases] == modes == ["reduce-overhead", "max-autotune"]
    expected, _ = setup.loss(1.0).at(setup.model, **drawn)
    assert all(torch.equal(value, expected) for value in found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_that_a_processor_can_run_passes_its_gate(precision):
    own: StepBench = bench(precision=precision, batch_size=4)
    cases = alternatives(own.setup)
    for case in cases:
        own.run(case, ("eager",))
    assert own.left_out == []
    measured = {row.extra["name"] for row in own.rows}
    unmeasured = [case.name for case in cases if case.name not in measured]
    assert [name.partition(":")[0] for name in unmeasured] == ["A", "G", "H", "A2"]
    assert "H: two_pass" in measured
