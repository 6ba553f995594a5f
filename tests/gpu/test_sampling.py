"""Sampling on a GPU with each evaluation as one launch: `python -m pytest tests/gpu/test_sampling.py`."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fullstride.errors import ConfigError
from fullstride.meanflow.config.presets import MODELS
from fullstride.meanflow.sampling.graphed import WARM, GraphedNetwork
from fullstride.meanflow.sampling.noise import seeded_noise
from fullstride.meanflow.sampling.samplers import SAMPLERS, meanflow_sample, sample
from fullstride.meanflow.training.build import build_model, in_channels_last
from fullstride.meanflow.training.step import randomize_zero_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
SHAPE = (1, 8, 8)
# Between two runs of the same products; bf16 and TF32 round the same factors, too.
TOLERANCE = 1e-5


def network(name, seed):
    model = build_model(MODELS[name](class_conditional=True), SHAPE, 10)
    return randomize_zero_layers(model, torch.Generator().manual_seed(seed)).to(CUDA).eval()


def relative(a, b):
    assert a.isfinite().all()
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name", ["unet_tiny", "song_unet_tiny", "dit_tiny"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("last", [False, True])
def test_recorded_images_are_the_eager_ones(name, precision, last, seed):
    model = network(name, seed)
    model = in_channels_last(model) if last else model
    asked = {"num": 47, "shape": SHAPE, "seed": seed, "num_classes": 10, "batch_size": 9, "device": CUDA}
    for sampler, steps in (("meanflow", 1), ("meanflow", 3), ("euler", 2)):
        found, right = (
            sample(model, sampler=sampler, steps=steps, precision=precision, backend=backend, **asked).images
            for backend in ("graph", "eager")
        )
        assert relative(found, right) < TOLERANCE


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_takes_a_recorded_network(sampler, seed):
    model = network("unet_tiny", seed)
    asked = {"sampler": sampler, "steps": None if sampler == "dopri5" else 2, "num": 13, "shape": SHAPE, "seed": seed}
    found, right = (
        sample(model, batch_size=5, device=CUDA, num_classes=10, backend=backend, **asked)
        for backend in ("auto", "eager")
    )
    # dopri5 chooses its steps by what rounding is a part of.
    assert relative(found.images, right.images) < (1e-3 if sampler == "dopri5" else TOLERANCE)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_an_evaluation_is_one_launch_of_a_graph_and_waits_for_nothing(seed):
    recorded = GraphedNetwork(network("unet_tiny", seed))
    noise = seeded_noise(seed, 0, 7, SHAPE, CUDA)
    label = torch.arange(7, device=CUDA)
    with torch.no_grad():
        meanflow_sample(recorded, noise, steps=WARM + 1, label=label)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            meanflow_sample(recorded, noise, steps=5, label=label)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
            meanflow_sample(recorded, noise, steps=5, label=label)
    launches = sum(event.count for event in seen.key_averages() if event.key == "cudaGraphLaunch")
    assert launches == 5


def test_weights_that_are_written_into_count(seed):
    model = network("unet_tiny", seed)
    recorded = GraphedNetwork(model)
    noise = seeded_noise(seed, 0, 5, SHAPE, CUDA)
    with torch.no_grad():
        meanflow_sample(recorded, noise, steps=WARM + 2)
        for p in model.parameters():
            p.mul_(1.25)
        found, right = (meanflow_sample(net, noise, steps=2).images for net in (recorded, model))
    assert relative(found, right) < TOLERANCE


class Waiting(nn.Module):
    """Network that reads a number of the device on the host."""

    def forward(self, z, r, t, label=None):
        return z * t.max().item()


def test_a_network_that_waits_runs_as_it_is_where_a_record_is_not_required(seed, capsys):
    asked = {
        "sampler": "meanflow",
        "steps": WARM + 3,
        "num": 9,
        "shape": SHAPE,
        "seed": seed,
        "batch_size": 4,
        "device": CUDA,
    }
    found, right = (sample(Waiting().eval(), backend=backend, **asked) for backend in ("auto", "eager"))
    assert relative(found.images, right.images) < TOLERANCE
    assert "cannot be captured in a CUDA graph" in capsys.readouterr().err
    model = network("unet_tiny", seed)
    found, right = (sample(model, backend=backend, **asked) for backend in ("auto", "eager"))
    assert relative(found.images, right.images) < TOLERANCE
    assert "not recorded" not in capsys.readouterr().err


def test_a_network_that_waits_is_named_and_the_device_goes_on(seed):
    noise = seeded_noise(seed, 0, 3, SHAPE, CUDA)
    with torch.no_grad(), pytest.raises(ConfigError, match="the network cannot be captured in a CUDA graph"):
        meanflow_sample(GraphedNetwork(Waiting().eval()), noise, steps=WARM + 1)
    model = network("unet_tiny", seed)
    with torch.no_grad():
        found, right = (meanflow_sample(net, noise, steps=4).images for net in (GraphedNetwork(model), model))
    assert relative(found, right) < TOLERANCE
