"""What the step's bench can be asked for; nothing here needs PyTorch."""

from dataclasses import dataclass

from fullstride.device.precision import PRECISIONS
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config.presets import MODELS

SECTIONS = ("ratios", "backends", "alternatives", "scaling", "batches", "profile", "autotune")
BACKENDS = ("eager", "graph", "compile", "compile+graph")
MOST_AVERAGES = 5


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        device, precision, model: by name.
        batch_size: images of a step.
        sections: of the tables.
        backends: that steps run by; empty for all that the device has, on a CPU eager alone.
        full_step: whether a step is whole, with fused AdamW and averages, or forward and backward alone.
        averages: of the weights, in a whole step.
        channels_last: memory order of filters and images.
        dropout: whether the network drops units as its preset says; the gates judge it without.
        only: parts of names of the rows to measure; flow matching always is.
        jobs: processes that compile at once; 1 compiles in the bench's own, one after the other.
        seconds: after which nothing more is begun.

    """

    device: str = "auto"
    precision: str = "fp32"
    model: str = "unet"
    batch_size: int = 64
    sections: tuple[str, ...] = ("ratios",)
    backends: tuple[str, ...] = ()
    full_step: bool = False
    averages: int = 3
    channels_last: bool = False
    dropout: bool = False
    only: tuple[str, ...] = ()
    jobs: int = 1
    seconds: float = 200.0

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            ConfigError: for one that there is not.

        """
        one_of("--precision", self.precision, PRECISIONS)
        one_of("--model", self.model, MODELS)
        for option, given, names in (("section", self.sections, SECTIONS), ("backend", self.backends, BACKENDS)):
            for value in given:
                one_of(f"--{option}", value, names)
        if not 0 <= self.averages <= MOST_AVERAGES:
            raise ConfigError(f"--averages={self.averages}: expected at most {MOST_AVERAGES}")
