"""Guidance and 'no class' as options of sampling."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.config.commands import SampleOptions
from fullstride.meanflow.config.presets import LOSSES
from fullstride.meanflow.config.schema import LossConfig
from fullstride.meanflow.sampling.generate import load_generator, sample_command
from fullstride.meanflow.sampling.noise import seeded_noise
from fullstride.meanflow.sampling.samplers import SAMPLERS, sample
from fullstride.meanflow.training.trainer import train
from tests.meanflow.checkpoints.test_start import MODEL, config


class Drift(nn.Module):
    """A velocity that is a number of the class alone, so that every solver is exact."""

    def __init__(self, seed: int):
        super().__init__()
        self.of_class = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        self.none = 0.75

    def forward(self, z: Tensor, r: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        v = torch.full_like(r, self.none) if label is None else self.of_class[label]
        return v[:, None, None].expand_as(z)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("scale", [1.0, 2.5, 0.0])
def test_every_sampler_goes_along_the_guided_velocity(sampler, scale, seed):
    model, label = Drift(seed), torch.tensor([4, 0, 1])
    steps = None if sampler == "dopri5" else 3
    given: dict[str, Any] = {"sampler": sampler, "steps": steps, "num": 3, "shape": (2, 3), "seed": seed}
    found = sample(model, label=label, num_classes=5, guidance=scale, **given)
    v = model.none + scale * (model.of_class[label] - model.none)
    expected = seeded_noise(seed, 0, 3, (2, 3)) - v[:, None, None]
    torch.testing.assert_close(found.images, expected, rtol=1e-5, atol=1e-5)
    plain = sample(model, label=label, num_classes=5, **given)
    assert found.nfe == plain.nfe * (1 if scale == 1 else 2)
    free = sample(model, **given)
    torch.testing.assert_close(free.images, seeded_noise(seed, 0, 3, (2, 3)) - model.none, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scale", "classes"), [(2.0, 0), (float("nan"), 5)])
def test_guidance_that_cannot_be_is_refused(scale, classes):
    with pytest.raises(ValueError, match=f"with num_classes {classes}, expected a number, and 1 without classes"):
        sample(Drift(0), sampler="euler", steps=1, num=2, shape=(2, 3), seed=0, num_classes=classes, guidance=scale)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Runs with dropped labels, with none dropped, and without classes."""
    folder = tmp_path_factory.mktemp("guided")
    dropped = LossConfig(meanflow_ratio=0.0, label_dropout=0.2)
    none = dataclasses.replace(MODEL, class_conditional=False)
    return {
        "dropped": train(config(folder, loss=dropped, run_name="dropped")),
        "kept": train(config(folder, loss=LOSSES["mse"](), run_name="kept")),
        "free": train(config(folder, loss=LOSSES["mse"](), model=none, run_name="free")),
    }


def test_the_command_samples_guided_and_without_class(runs):
    generator = load_generator(runs["dropped"], "cpu")
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"guidance": 3.0, "label": 2}, {"guidance": 3.0, "label": 2, "num_classes": 10}),
        ({"no_class": True}, {"num_classes": 0}),
    ]
    for options, given in pairs:
        grid = sample_command(runs["dropped"], SampleOptions(steps=2, num=4, device="cpu", **options))
        made = json.loads((grid.parent / "samples.json").read_text())
        expected = sample(generator.model, sampler="meanflow", steps=2, num=4, shape=(1, 8, 8), seed=0, **given)
        assert made["nfe"] == expected.nfe
        assert "no-class" in grid.parent.name if "no_class" in options else "guidance-3.0" in grid.parent.name
        assert not (grid.parent / "classes.png").exists()


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        ("free", {"guidance": 2.0}, "--guidance 2: this run has no classes"),
        ("free", {"no_class": True}, "--no-class: this run has no classes"),
        ("kept", {"guidance": 2.0}, "--guidance 2: the run was trained with loss.label_dropout=0"),
        ("kept", {"no_class": True}, "--no-class: the run was trained with loss.label_dropout=0"),
        ("dropped", {"no_class": True, "label": 1}, "--no-class with --label: expected one of them"),
        ("dropped", {"no_class": True, "guidance": 2.0}, "with --guidance: expected one of them"),
    ],
)
def test_what_a_run_cannot_do_is_refused_in_words(runs, run, options, message):
    with pytest.raises(ConfigError, match=message):
        sample_command(runs[run], SampleOptions(steps=1, num=2, device="cpu", **options))
