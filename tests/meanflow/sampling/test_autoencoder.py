import sys

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.sampling.autoencoder import load_autoencoder
from tests.meanflow.sampling import fake_diffusers
from tests.meanflow.sampling.fake_diffusers import Folding, autoencoder

__all__ = ["autoencoder"]  # a fixture
CPU = torch.device("cpu")


def test_moments_and_pictures_are_the_networks(autoencoder: Folding, tmp_path):
    found, x, z = load_autoencoder(tmp_path / "vae", CPU), torch.randn(3, 3, 8, 6), torch.randn(2, 4, 3, 5)
    assert torch.equal(found.moments(x), fake_diffusers.moments(x))
    assert torch.equal(found.pictures(z), fake_diffusers.pictures(z))
    assert (found.scale, autoencoder.training) == (0.25, False)


def test_what_cannot_be_loaded_is_one_line(autoencoder: Folding, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"no autoencoder in diffusers' layout \(no config.json"):
        load_autoencoder(tmp_path / "none", CPU)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match="diffusers is not installed"):
        load_autoencoder(tmp_path / "vae", CPU)
