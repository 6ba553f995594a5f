"""KL autoencoders in diffusers' layout, such as sd-vae-ft-mse, between pictures and latents."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.device.precision import exact_fp32
from fullstride.errors import ConfigError, one_line


@dataclass(frozen=True)
class Autoencoder:
    """An autoencoder on a device, in eval mode."""

    network: Any
    device: torch.device

    @torch.no_grad()
    def moments(self, pictures: Float[Tensor, "n 3 H W"]) -> Float[Tensor, "n d h w"]:
        """Encode pictures in [-1, 1]: c means, then c log-variances, d = 2c, in fp32 on the CPU."""
        with exact_fp32(self.device):
            return self.network.encode(pictures.to(self.device)).latent_dist.parameters.float().cpu()

    @torch.no_grad()
    def pictures(self, latents: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 3 H W"]:
        """Decode unscaled latents, in fp32 on the CPU, not clipped to [-1, 1].

        Raises:
            FloatingPointError: if they are not finite.

        """
        with exact_fp32(self.device):
            pictures = self.network.decode(latents.to(self.device)).sample.float().cpu()
        if not pictures.isfinite().all():
            raise FloatingPointError(
                "the autoencoder decoded finite latents to pictures that are not finite; give another --vae"
            )
        return pictures

    @property
    def scale(self) -> float | None:
        """Factor that brings the latents to about unit variance, if the autoencoder's configuration has one."""
        return getattr(self.network.config, "scaling_factor", None)


def load_autoencoder(folder: Path, device: torch.device) -> Autoencoder:
    """The autoencoder in a folder; nothing is fetched.

    Raises:
        ConfigError: if diffusers is not installed, or the folder holds no such autoencoder.

    """
    try:
        from diffusers import AutoencoderKL  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ConfigError(f"--vae {folder}: diffusers is not installed; run: pip install diffusers") from None
    try:
        network = AutoencoderKL.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--vae {folder}: no autoencoder in diffusers' layout ({one_line(error)})") from None
    return Autoencoder(network.to(device).eval(), device)
