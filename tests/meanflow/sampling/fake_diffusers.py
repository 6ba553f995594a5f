"""An autoencoder in diffusers' layout whose moments and pictures are known in closed form."""

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

SIDE = 2  # pixels of a latent's


class Folding(nn.Module):
    """Means are the pixels of 2 x 2 blocks of the first channel, log-variances those of the second less 3."""

    def __init__(self, scaling_factor: float | None = 0.25):
        super().__init__()
        self.config = types.SimpleNamespace(**({} if scaling_factor is None else {"scaling_factor": scaling_factor}))
        self.broken, self.encoded = False, 0

    def encode(self, x: Tensor) -> types.SimpleNamespace:
        self.encoded += len(x)
        return types.SimpleNamespace(latent_dist=types.SimpleNamespace(parameters=moments(x)))

    def decode(self, latents: Tensor) -> types.SimpleNamespace:
        if self.broken:
            raise RuntimeError("no decoder")
        return types.SimpleNamespace(sample=pictures(latents))


def moments(x: Tensor) -> Tensor:
    """Moments (n, 8, H/2, W/2) of pictures (n, 3, H, W)."""
    folded = nn.functional.pixel_unshuffle(x[:, :2], SIDE)
    return torch.cat([folded[:, :4], folded[:, 4:] - 3], 1)


def pictures(latents: Tensor) -> Tensor:
    """Pictures (n, 3, 2h, 2w) of latents (n, 4, h, w)."""
    return nn.functional.pixel_shuffle(latents, SIDE).tanh().expand(-1, 3, -1, -1)


@pytest.fixture
def autoencoder(monkeypatch, tmp_path) -> Folding:
    """In place of diffusers', in the folder tmp_path / "vae"."""
    network, fake, folder = Folding(), types.ModuleType("diffusers"), tmp_path / "vae"
    folder.mkdir()
    (folder / "config.json").write_text("{}")

    def from_pretrained(path: Path, local_files_only: bool) -> Folding:
        if not (path / "config.json").is_file():
            raise OSError(f"no config.json in {path}")
        assert local_files_only
        return network

    fake.AutoencoderKL = types.SimpleNamespace(from_pretrained=from_pretrained)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "diffusers", fake)
    return network
