import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fullstride.errors import ConfigError
from fullstride.meanflow.config.commands import SampleOptions
from fullstride.meanflow.models.unet import UNet
from fullstride.meanflow.sampling.generate import sample_command
from fullstride.meanflow.sampling.noise import seeded_labels, seeded_noise
from fullstride.meanflow.sampling.samplers import (
    SAMPLERS,
    SampleResult,
    evaluating,
    meanflow_sample,
    ode_sample,
    sample,
    worst_sample_rms,
)
from tests.meanflow.fields import GaussianField

EVALUATIONS_A_STEP = {"meanflow": 1, "euler": 1, "midpoint": 2, "heun": 2, "rk4": 4}
ORDERS = {"euler": 1, "midpoint": 2, "heun": 2, "rk4": 4}
SEEDS = [0, 1, 2]


def over_pixels(time):
    return time[:, None, None, None]


class Linear:
    """dz/dt = a z, whose flow is z_r = z_t exp(-a (t - r))."""

    def __init__(self, rate=1.3):
        self.rate = rate

    def position(self, z, r, t):
        return z * torch.exp(-self.rate * over_pixels(t - r))

    def velocity(self, z, t):
        return self.rate * z

    def __call__(self, z, r, t, label=None):
        """The exact average velocity, (z_t - z_r) / (t - r)."""
        average = (z - self.position(z, r, t)) / over_pixels(t - r).clamp(min=1e-30)
        return torch.where(over_pixels(r < t), average, self.velocity(z, t))


class Separable(Linear):
    """dz/dt = cos(2t) / cosh(z): sinh(z) - sin(2t) / 2 is conserved. Neither linear nor autonomous."""

    def position(self, z, r, t):
        return torch.asinh(z.sinh() - over_pixels(torch.sin(2 * t) - torch.sin(2 * r)) / 2)

    def velocity(self, z, t):
        return torch.cos(2 * over_pixels(t)) / z.cosh()


FIELDS = {"linear": Linear(), "gaussian": GaussianField(), "separable": Separable()}


def exact(field, noise):
    return field.position(noise, noise.new_zeros(len(noise)), noise.new_ones(len(noise)))


def noise64(seed, batch=5):
    return seeded_noise(seed, 0, batch, (3, 2, 3)).double()


class Recorder:
    """Counts the calls of a field and keeps their times and labels."""

    def __init__(self, field):
        self.field, self.times, self.labels = field, [], []

    def __call__(self, z, r, t, label=None):
        assert r.shape == t.shape == z.shape[:1]
        assert r.dtype == t.dtype == z.dtype
        self.times.append((r.clone(), t.clone()))
        self.labels.append(label)
        return self.field(z, r, t, label)


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(3)
    net = UNet(
        1,
        8,
        channels=8,
        channel_mult=(1, 2),
        num_blocks=1,
        attention_resolutions=(4,),
        dropout=0.3,
        time_max_frequency=4.0,
        num_classes=4,
    )
    for parameter in net.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return net


def draw(model, sampler="meanflow", **changes):
    steps = None if sampler == "dopri5" else 2
    arguments = {"steps": steps, "num": 7, "shape": (1, 8, 8), "seed": 5, "batch_size": 7} | changes
    return sample(model, sampler=sampler, **arguments)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_meanflow_with_the_exact_average_velocity_is_the_flow(name, steps, seed):
    field, noise = FIELDS[name], noise64(seed)
    result = meanflow_sample(field, noise, steps=steps)
    torch.testing.assert_close(result.images, exact(field, noise), rtol=1e-12, atol=1e-12)
    assert result.nfe == steps


def test_the_gaussian_flow_moves_noise_onto_the_data():
    noise = noise64(0)
    torch.testing.assert_close(exact(GaussianField(0.7, 0.4), noise), 0.7 + 0.4 * noise, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["linear", "separable"])
@pytest.mark.parametrize("method", ORDERS)
def test_order_of_convergence(method, name, seed):
    field, noise = FIELDS[name], noise64(seed)
    counts = (64, 128)
    errors = [
        (ode_sample(field, noise, method=method, steps=n).images - exact(field, noise)).abs().max().item()
        for n in counts
    ]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(ORDERS[method], abs=0.15)


@pytest.mark.parametrize("method", ORDERS)
def test_solvers_reach_the_gaussian_data(method):
    # No order is asked for here: on this path the leading error of midpoint integrates to zero.
    noise = noise64(0)
    result = ode_sample(GaussianField(), noise, method=method, steps=400)
    torch.testing.assert_close(result.images, exact(GaussianField(), noise), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("tolerance", [1e-3, 1e-5, 1e-8])
def test_dopri5_keeps_its_tolerance(name, tolerance):
    field, noise = FIELDS[name], noise64(1)
    result = ode_sample(field, noise, method="dopri5", rtol=tolerance, atol=tolerance)
    # The tolerance bounds the error of a step; those of the steps add up.
    assert worst_sample_rms(result.images - exact(field, noise)) < 30 * tolerance


def test_dopri5_takes_more_evaluations_for_a_tighter_tolerance():
    loose, tight = (ode_sample(GaussianField(), noise64(0), method="dopri5", rtol=x, atol=x) for x in (1e-3, 1e-9))
    assert loose.nfe < tight.nfe


def test_dopri5_steps_for_the_worst_sample():
    def field(z, r, t, label=None):
        """Channel 0 stands still and is the rate of channel 1."""
        return torch.cat([torch.zeros_like(z[:, :1]), z[:, :1] * z[:, 1:]], dim=1)

    rates = torch.full((400, 1, 2, 2), 0.01, dtype=torch.float64)
    rates[7] = -9.0
    noise = torch.cat([rates, torch.ones_like(rates)], dim=1)
    alone = ode_sample(field, noise[7:8], method="dopri5")
    crowd = ode_sample(field, noise, method="dopri5")
    assert crowd.nfe == alone.nfe
    torch.testing.assert_close(crowd.images[7:8], alone.images, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(crowd.images[:, 1:], (-rates).exp(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_worst_sample_rms(seed):
    x = noise64(seed)
    expected = max(math.sqrt(sum(v * v for v in one) / len(one)) for one in x.flatten(1).tolist())
    assert worst_sample_rms(x).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("sampler", EVALUATIONS_A_STEP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_and_evaluations_are_exact(sampler, dtype):
    noise = seeded_noise(0, 0, 2, (1, 1, 1)).to(dtype)
    # In fp32, 61, 109 and 123 are among those where ceil(1 / (1 / n)) is n + 1.
    for steps in (1, 2, 3, 10, 49, 50, 61, 109, 123):
        model = Recorder(GaussianField())
        result = SAMPLERS[sampler](model, noise, steps=steps)
        assert result.nfe == len(model.times) == steps * EVALUATIONS_A_STEP[sampler]


def test_dopri5_counts_its_evaluations():
    model = Recorder(GaussianField())
    result = ode_sample(model, noise64(0), method="dopri5")
    # One at the start, one to choose the first step, six for each attempted step.
    assert result.nfe == len(model.times)
    assert (result.nfe - 2) % 6 == 0


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("field", [GaussianField(), Linear(1e-4)], ids=["gaussian", "slow"])
def test_the_network_sees_only_times_it_was_trained_on(sampler, dtype, field):
    model = Recorder(field)
    SAMPLERS[sampler](model, noise64(0).to(dtype), **({} if sampler == "dopri5" else {"steps": 13}))
    r, t = (torch.stack(times) for times in zip(*model.times, strict=True))
    assert (r >= 0).all()
    assert (r <= t).all()
    assert (t <= 1).all()
    assert (t[0] == 1).all()
    assert (r[-1].abs() < 1e-30).all() if sampler in ("meanflow", "dopri5") else torch.equal(r, t)


def test_meanflow_intervals_meet():
    model = Recorder(Linear())
    meanflow_sample(model, noise64(0), steps=4)
    assert [(r[0].item(), t[0].item()) for r, t in model.times] == [
        (0.75, 1),
        (0.5, 0.75),
        (0.25, 0.5),
        (0, 0.25),
    ]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_low_precision_network_leaves_the_arithmetic_of_steps_in_fp32(sampler):
    def field(z, r, t, label=None):
        """1 is exact in bf16; a step of 1/50 or its product with a velocity is not."""
        return torch.ones_like(z, dtype=torch.bfloat16)

    noise = noise64(0).float()
    images = SAMPLERS[sampler](field, noise, steps=None if sampler == "dopri5" else 50).images
    assert images.dtype == torch.float32
    # A rounding of the largest value at each of some 50 steps: processors differ in it; bf16 has 2^16 times as much.
    rounding = 50 * torch.finfo(torch.float32).eps * noise.abs().max().item()
    torch.testing.assert_close(images, noise - 1, rtol=0, atol=rounding)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", [SEEDS[0], pytest.param(SEEDS[1], marks=pytest.mark.thorough)])
def test_images_do_not_depend_on_the_batch_size(unet, sampler, seed):
    whole = draw(unet, sampler, seed=seed, num_classes=4, num=5)
    assert whole.images.std() > 0.1
    # The flow of random weights widens an error tenfold; dopri5's own is 1e-5.
    tolerance = 1e-3 if sampler == "dopri5" else 1e-5
    for batch_size in (2, 100):
        parts = draw(unet, sampler, seed=seed, num_classes=4, num=5, batch_size=batch_size)
        torch.testing.assert_close(parts.images, whole.images, rtol=tolerance, atol=tolerance)
    fewer = draw(unet, sampler, seed=seed, num_classes=4, num=3)
    torch.testing.assert_close(fewer.images, whole.images[:3], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_batches_start_from_seeded_noise_and_labels(batch_size):
    def unchanged(z, r, t, label=None):
        seen.append(label)
        return torch.zeros_like(z)

    seen = []
    result = draw(unchanged, steps=1, num_classes=4, batch_size=batch_size)
    assert torch.equal(result.images, seeded_noise(5, 0, 7, (1, 8, 8)))
    assert torch.equal(torch.cat(seen), seeded_labels(5, 0, 7, 4))


def test_another_seed_gives_other_images(unet):
    assert (draw(unet, seed=1).images - draw(unet, seed=2).images).abs().mean() > 0.1


def test_chosen_labels_reach_the_network():
    model = Recorder(Linear())
    draw(model, label=3, num_classes=4, batch_size=5, steps=1)
    assert [label.tolist() for label in model.labels] == [[3] * 5, [3] * 2]
    model = Recorder(Linear())
    chosen = torch.tensor([0, 1, 2, 3, 3, 2, 1])
    draw(model, label=chosen, num_classes=4, batch_size=5, steps=1)
    assert torch.equal(torch.cat(model.labels), chosen)
    model = Recorder(Linear())
    draw(model)
    assert set(model.labels) == {None}


def test_nfe_is_the_mean_over_images(monkeypatch):
    calls = {2: 8.0, 1: 14.0}

    def adaptive(model, noise, *, steps, label):
        return SampleResult(noise, calls[len(noise)])

    monkeypatch.setitem(SAMPLERS, "dopri5", adaptive)
    assert draw(Linear(), "dopri5", num=3, batch_size=2).nfe == 10


def test_sampling_is_in_eval_mode_without_gradients_and_restores_each_mode(unet):
    unet.train()
    unet.middle.eval()
    modes = [m.training for m in unet.modules()]
    first, second = draw(unet), draw(unet)
    assert torch.equal(first.images, second.images)
    assert not first.images.requires_grad
    assert first.images.dtype == torch.float32
    assert [m.training for m in unet.modules()] == modes
    assert any(modes)


def test_modes_are_restored_after_an_error(unet):
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Dropout()

        def forward(self, z, r, t, label=None):
            assert not self.inner.training
            raise RuntimeError("out of memory")

    model = Failing().train()
    with pytest.raises(RuntimeError, match="out of memory"):
        draw(model)
    assert model.training
    assert model.inner.training
    assert torch.is_grad_enabled()


def test_evaluating_accepts_a_plain_function():
    with evaluating(Linear()):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "eular"}, "sampler=eular: expected one of euler, .*did you mean euler"),
        ({"sampler": "rk5"}, "expected one of rk4, "),
        ({"sampler": "zzzz"}, "expected one of meanflow, euler, midpoint, heun, rk4, dopri5$"),
        ({"num": 0}, "num is 0"),
        ({"batch_size": -1}, "batch_size -1"),
        ({"seed": -1}, "seed is -1"),
        ({"label": 4, "num_classes": 4}, r"label is in \[4, 4\], but num_classes is 4"),
        ({"label": -1, "num_classes": 4}, r"label is in \[-1, -1\]"),
        ({"label": 0}, "num_classes is 0"),
        ({"label": torch.tensor([1, 2]), "num_classes": 4}, "label has 2 entries, expected num = 7"),
        ({"sampler": "dopri5", "steps": 10}, "steps is 10, but dopri5 chooses its own"),
    ],
)
def test_impossible_requests_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        draw(Linear(), **changes)


@pytest.mark.parametrize("sampler", EVALUATIONS_A_STEP)
@pytest.mark.parametrize("steps", [0, -2, None])
def test_fixed_step_samplers_demand_steps(sampler, steps):
    with pytest.raises(ValueError, match=f"steps is {steps}, expected at least 1 for the sampler '{sampler}'"):
        draw(Linear(), sampler, steps=steps)


def test_unknown_ode_method():
    with pytest.raises(ValueError, match="method=midpont: expected one of .*did you mean midpoint"):
        ode_sample(Linear(), noise64(0), method="midpont", steps=3)


@pytest.mark.parametrize("tolerances", [(0.0, 1e-5), (1e-5, -1.0), (math.nan, 1e-5), (1e-5, 0.0), (1e-8, 1e-5)])
def test_tolerances_are_positive_and_above_rounding(tolerances):
    rtol, atol = tolerances
    with pytest.raises(ValueError, match=r"rtol is .* expected rtol >= 1.2e-07 .* and atol > 0"):
        ode_sample(Linear(), noise64(0).float(), method="dopri5", rtol=rtol, atol=atol)


def test_dopri5_names_the_time_at_which_a_velocity_is_not_finite():
    def breaks(z, r, t, label=None):
        return torch.where(over_pixels(t) < 0.5, math.nan, z)

    with pytest.raises(ValueError, match=r"velocity at t = 0\.\d+ is not finite"):
        ode_sample(breaks, noise64(0), method="dopri5")


def test_dopri5_says_when_its_tolerance_is_out_of_reach():
    def jumps(z, r, t, label=None):
        return torch.where(over_pixels(t) < 0.5, 1e8, z)

    with pytest.raises(ValueError, match=r"cannot keep rtol=1e-05, atol=1e-05 in torch.float32 \(underflow"):
        ode_sample(jumps, noise64(0).float(), method="dopri5")


def test_dopri5_gives_up_after_many_steps(monkeypatch):
    monkeypatch.setattr("fullstride.meanflow.sampling.samplers.MAX_ADAPTIVE_STEPS", 20)
    with pytest.raises(ValueError, match=r"cannot keep .* \(max_num_steps exceeded"):
        ode_sample(Linear(300.0), noise64(0), method="dopri5")


def test_samples_are_plain_fp32_whatever_the_process_computes_in(monkeypatch):
    seen = []

    def network(z, r, t, label=None):
        tf32 = torch.backends.cudnn.allow_tf32
        seen.append((torch.get_float32_matmul_precision(), tf32, torch.is_autocast_enabled("cpu")))
        return z

    model = torch.nn.Identity()
    monkeypatch.setattr(model, "forward", network)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            sample(model, sampler="euler", steps=2, num=3, shape=(1, 2, 2), seed=0)
        assert seen == [("highest", False, False)] * 2
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_named_precision_is_the_networks_alone_and_ends_with_it():
    """Products of rounded factors, steps of fp32; and images that are nearly those of fp32."""
    torch.manual_seed(0)
    model, seen = torch.nn.Conv2d(3, 3, 3, padding=1), []

    class Velocity(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, z, r, t, label=None):
            out = self.inner(z)
            seen.append((z.dtype, out.dtype))
            return out

    chosen = {"sampler": "euler", "steps": 4, "num": 5, "shape": (3, 6, 6), "seed": 1}
    exact = sample(Velocity(), **chosen).images
    assert set(seen) == {(torch.float32, torch.float32)}
    seen.clear()
    rounded = sample(Velocity(), precision="bf16", **chosen).images
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.02)
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(ConfigError, match="TF32 is CUDA's"):
        sample(Velocity(), precision="tf32", **chosen)
    with pytest.raises(ConfigError, match="precision"):
        sample(Velocity(), precision="fp8", **chosen)


@pytest.mark.parametrize("batch_size", [4, 9])
def test_images_are_fp32_on_the_host_whatever_tensors_are_by_default(unet, batch_size):
    right = draw(unet, batch_size=batch_size).images
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = draw(unet, batch_size=batch_size).images
    finally:
        torch.set_default_dtype(default)
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    with torch.device("meta"):
        assert seeded_noise(0, 0, 3, (1, 4, 4)).isfinite().all()


def test_a_printed_result_says_how_many_images_of_which_size_took_what(seed):
    count, size = 2 + seed, 3 + seed
    made = SampleResult(torch.zeros(count, 1, size, size + 1), 1.0)
    assert str(made) == f"{count} images of 1 x {size} x {size + 1}, 1 evaluation of the network each"
    assert str(replace(made, nfe=2.5)).endswith(", 2.5 evaluations of the network each")


@pytest.mark.parametrize(
    ("sampler", "steps", "said"),
    [
        ("heun", None, r"--sampler heun without --steps: expected .*2 network evaluations each, such as --steps 50"),
        ("meanflow", None, r"--sampler meanflow without --steps"),
        ("dopri5", 5, "--sampler dopri5 --steps 5: this sampler chooses its own"),
        ("eular", 5, "--sampler=eular: expected one of .*did you mean euler"),
    ],
)
def test_the_command_says_by_its_options_what_a_sampler_needs(tmp_path, sampler, steps, said):
    with pytest.raises(ConfigError, match=said):
        sample_command(tmp_path, SampleOptions(sampler=sampler, steps=steps, device="cpu"))
