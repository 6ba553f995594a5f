"""Guidance by the inputs of a network that was trained with them, at the cost of the network alone."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.config.commands import SampleOptions
from fullstride.meanflow.config.losses import WholeImprovedConfig
from fullstride.meanflow.config.schema import TrainConfig


class GuidanceInput(nn.Module):
    """A network such as `MiT` at one guidance scale, which holds for times in [start, end]."""

    def __init__(self, network: nn.Module, scale: float, start: float = 0.0, end: float = 1.0):
        """Fix the scale and its interval."""
        super().__init__()
        self.network, self.given = network, {"omega": scale, "start": start, "end": end}

    def forward(
        self, z: Float[Tensor, "b *s"], r: Float[Tensor, " b"], t: Float[Tensor, " b"], label: Int[Tensor, " b"]
    ) -> Float[Tensor, "b *s"]:
        """The average velocity of the guided flow."""
        return self.network(z, r, t, label, **{name: torch.full_like(t, x) for name, x in self.given.items()})


def with_guidance_input(network: nn.Module, config: TrainConfig, options: SampleOptions) -> nn.Module:
    """The network at the guidance of the options; itself if they give none.

    Raises:
        ConfigError: for a run whose network takes no guidance, a scale that it never saw, or an empty interval.

    """
    scale, start, end = options.omega, options.omega_start, options.omega_end
    if scale is None:
        if (start, end) != (0, 1):
            raise ConfigError(f"--omega-start {start} --omega-end {end} without --omega; expected a scale as well")
        return network
    loss = config.loss
    if not (isinstance(loss, WholeImprovedConfig) and config.model.class_conditional):
        raise ConfigError(
            f"--omega {scale}: expected a run of loss=imf_whole with classes, whose network takes a scale"
        )
    if not 1 <= scale <= loss.largest_scale:
        raise ConfigError(
            f"--omega {scale}: expected 1 to {loss.largest_scale:g}, the scales that the run was trained with"
        )
    if not 0 <= start <= 0.5 <= end <= 1:
        raise ConfigError(
            f"--omega-start {start} --omega-end {end}: expected 0 to 0.5 and 0.5 to 1, as the run was trained with"
        )
    return GuidanceInput(network, scale, start, end)
