"""A run of improved MeanFlow from training to samples at another guidance."""

import json

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.config.commands import SampleOptions
from fullstride.meanflow.config.losses import WholeImprovedConfig
from fullstride.meanflow.config.networks import MODELS
from fullstride.meanflow.config.schema import DataConfig, GuardConfig
from fullstride.meanflow.models.mit import MiT
from fullstride.meanflow.sampling.generate import load_generator, sample_command
from fullstride.meanflow.sampling.guidance_input import GuidanceInput
from fullstride.meanflow.training.trainer import train
from tests.meanflow.training.test_trainer import config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one step with every check of the first step."""
    model = MODELS["mit_tiny"](class_conditional=True, width=24, depth=2, head_blocks=1)
    loss = WholeImprovedConfig("imf_whole", meanflow_ratio=0.5, label_dropout=0.2, largest_scale=4.0)
    given = {"model": model, "loss": loss, "data": DataConfig(batch_size=449), "guard": GuardConfig()}
    return train(config(tmp_path_factory.mktemp("whole"), **given, epochs=1, gradient_accumulation_steps=1))


def test_a_run_is_sampled_at_any_scale_it_was_trained_with(run, tmp_path):
    generator = load_generator(run, "cpu")
    z = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    t, label = torch.ones(3), torch.tensor([0, 5, 9])
    assert isinstance(generator.model, MiT)
    for p in generator.model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    plain = generator.model(z, 0 * t, t, label)
    torch.testing.assert_close(GuidanceInput(generator.model, 1.0)(z, 0 * t, t, label), plain)
    given = {"omega": 3 * t, "start": 0.25 * t, "end": 0.75 * t}
    expected = generator.model(z, 0 * t, t, label, **given)
    torch.testing.assert_close(GuidanceInput(generator.model, 3.0, 0.25, 0.75)(z, 0 * t, t, label), expected)
    options = SampleOptions(
        num=2, steps=1, omega=3.0, omega_start=0.25, omega_end=0.75, out=tmp_path / "samples", device="cpu"
    )
    sample_command(run, options)
    made = json.loads(next((tmp_path / "samples").glob("*.json")).read_text())
    assert (made["omega"], made["omega_start"], made["omega_end"], made["nfe"]) == (3.0, 0.25, 0.75, 1.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"omega": 5.0}, "expected 1 to 4"),
        ({"omega": 2.0, "omega_start": 0.6}, "expected 0 to 0.5 and 0.5 to 1"),
        ({"omega_end": 0.7}, "without --omega"),
    ],
)
def test_what_the_network_never_saw_is_refused(run, options, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        sample_command(run, SampleOptions(num=2, steps=1, device="cpu", out=tmp_path / "samples", **options))
