"""What the sampling bench can be asked for; nothing here needs PyTorch."""

from dataclasses import dataclass

from fullstride.device.precision import PRECISIONS
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config.presets import MODELS

BACKENDS = ("eager", "graph", "compile+graph")


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        device, precision, model: by name.
        batches: images of a forward pass, several sizes; the device's own if none.
        backends: how the network is run; all that the device has if none, on a CPU eager alone.
        channels_last: memory order of filters and images.
        seconds: after which nothing more is begun.

    """

    device: str = "auto"
    precision: str = "fp32"
    model: str = "unet"
    batches: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    channels_last: bool = False
    seconds: float = 200.0

    def __post_init__(self) -> None:
        """Check the names and the sizes.

        Raises:
            ConfigError: for one that there is not, or a batch of no image.

        """
        one_of("--precision", self.precision, PRECISIONS)
        one_of("--model", self.model, MODELS)
        for name in self.backends:
            one_of("--backend", name, BACKENDS)
        if any(batch < 1 for batch in self.batches):
            raise ConfigError(f"--batch-size: {', '.join(map(str, self.batches))}, expected at least 1 each")
