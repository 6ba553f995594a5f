from dataclasses import replace

import pytest
import torch

from benchmarks.cases.meanflow import step_gate as bench_step_gate
from benchmarks.cases.meanflow.step_cases import Pass, StepCase
from benchmarks.cases.meanflow.step_gate import Exact, points
from fullstride.measure.gate import GateError
from tests.benchmarks.cases.meanflow.quick_bench import bench, gradient, quick, setup  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [3, 11])
def test_means_over_repeated_samples_are_those_of_the_whole_batch(monkeypatch, ratio, size):
    monkeypatch.setattr(bench_step_gate, "SAMPLES", 4)
    monkeypatch.setattr(bench_step_gate, "CHUNK", 3)
    own = setup(model="unet_tiny")
    exact, loss = Exact.of(own), own.loss(ratio)
    batch = exact.batch(loss, size)
    assert (batch["r"] < batch["t"]).sum() == round(ratio * size)
    value, slope = exact.step(loss, size)
    model = exact.model
    whole = loss.at(model, **{k: x.double() for k, x in batch.items()})[0]
    right = torch.cat([g.flatten() for g in torch.autograd.grad(whole, list(model.parameters()))])
    torch.testing.assert_close(value, whole.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(slope, right, rtol=1e-9, atol=1e-15)
    assert right.norm() > 0


def test_values_are_those_of_a_central_difference():
    own = setup(model="unet_tiny")
    exact = Exact.of(own)
    u, dudt = exact.values(5)
    z, r, t, v = (x.double() for x in points(exact.batch(own.loss(1.0), 5)))
    h = 1e-4
    with torch.no_grad():
        torch.testing.assert_close(u, exact.model(z, r, t))
        slope = (exact.model(z + h * v, r, t + h) - exact.model(z - h * v, r, t - h)) / (2 * h)
    assert (dudt - slope).norm() < 1e-3 * slope.norm()


def test_a_wrong_loss_gradient_or_derivative_is_not_timed():
    own = bench(model="unet_tiny", batch_size=7)
    loss = own.setup.loss(1.0)

    def wrong(scale, shift):
        return lambda setup, loss: lambda m, d: (x := loss.at(m, **d)[0]) * scale + shift * (x.detach() - x)

    def started(make):
        return StepCase("x", loss, make).start(own.setup, own.exact, 7)

    assert started(wrong(1.0, 0.0)).gate(False).errors["gradients"] < 1e-4
    with pytest.raises(GateError, match="loss: relative error"):
        started(wrong(1.1, 0.0)).gate(False)
    with pytest.raises(GateError, match="gradients: relative error"):
        started(wrong(1.0, 0.1)).gate(False)
    passing = Pass("JVP", "jvp").start(own.setup, own.exact, 7)
    assert passing.gate(False).errors["du/dt"] < 1e-4
    passing.drawn["r"] = passing.drawn["r"] * 0.5
    with pytest.raises(GateError, match="u: relative error"):
        passing.gate(False)


def test_the_gate_judges_without_dropout_what_is_timed_with_it():
    own = bench(model="song_unet_tiny", dropout=True, batch_size=4)
    started = StepCase("x", own.setup.loss(0.5)).start(own.setup, own.exact, 4)
    assert started.gate(False).errors["gradients"] < 1e-3
    assert own.setup.model.training
    state = own.setup.generator.get_state()
    losses = []
    for _ in range(2):
        own.setup.generator.set_state(state)
        losses.append(started.call(False)())
    assert losses[0] != losses[1]


def test_no_weight_of_the_timed_network_is_as_good_as_zero():
    for name in ("unet_tiny", "song_unet_tiny", "dit_tiny"):
        model = setup(model=name).model
        assert all(p.detach().square().mean() * p[0].numel() > 0.01 for p in model.parameters() if p.ndim > 1)


def test_a_step_leaves_gradients_of_fresh_samples():
    own = bench()
    started = StepCase("x", replace(own.setup.loss(0.4))).start(own.setup, own.exact, 5)
    found = []
    for _ in range(2):
        started.call(False)()
        found.append(gradient(own.setup))
    assert not torch.equal(*found)
    started.end()
    assert all(p.grad is None for p in own.setup.model.parameters())
