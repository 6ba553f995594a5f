"""What the bench of several GPUs can be asked for; nothing here needs PyTorch."""

from dataclasses import dataclass

from benchmarks.cases.meanflow.step_options import BACKENDS, MOST_AVERAGES
from fullstride.device.precision import PRECISIONS
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config.presets import MODELS

KINDS = ("ddp", "fsdp")
TRANSFERS = ("auto", "copies", "nccl")


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        device, precision, backend: by name.
        models: whose steps are timed.
        ratios: shares of the samples with r != t.
        kinds: what the processes share: ddp, fsdp.
        transfers: what gradients travel by, one after the other: auto, copies, nccl; on a CPU gloo alone.
        processes: most of them, a GPU each; 0 for as many as there are GPUs, on a CPU two.
        batch_size: images a process.
        averages: of the weights.
        largest: the network whose memory is measured; empty for none.
        only: parts of names of what is measured, as `unet`, `ratio 25%` or `memory`; everything if empty.
        seconds: after which nothing more is begun.

    """

    device: str = "auto"
    precision: str = "bf16"
    backend: str = "compile+graph"
    models: tuple[str, ...] = ("unet", "dit_b2")
    ratios: tuple[float, ...] = (1.0, 0.25)
    kinds: tuple[str, ...] = KINDS
    transfers: tuple[str, ...] = ("auto", "nccl")
    processes: int = 0
    batch_size: int = 64
    averages: int = 3
    largest: str = "dit_xl2"
    only: tuple[str, ...] = ()
    seconds: float = 300.0

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            ConfigError: for one that there is not.

        """
        one_of("--precision", self.precision, PRECISIONS)
        one_of("--backend", self.backend, BACKENDS)
        for name in (*self.models, *((self.largest,) if self.largest else ())):
            one_of("--model", name, MODELS)
        for kind in self.kinds:
            one_of("--kind", kind, KINDS)
        for transfers in self.transfers:
            one_of("--transfers", transfers, TRANSFERS)
        if not 0 <= self.averages <= MOST_AVERAGES:
            raise ConfigError(f"--averages={self.averages}: expected at most {MOST_AVERAGES}")
        if not all(0 <= ratio <= 1 for ratio in self.ratios):
            raise ConfigError(f"--ratio={self.ratios}: expected shares in [0, 1]")


def counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... below `most`, and `most`."""
    return tuple(sorted({most, *(2**i for i in range(most.bit_length()) if 2**i < most)}))
