"""Options of the cases `meanflow-...` of `python -m benchmarks`; nothing here needs PyTorch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.options import CaseOptions, Device, Names, Seconds, among
from fullstride.device.precision import PRECISIONS
from fullstride.errors import ConfigError
from fullstride.meanflow.config.presets import MODELS

SECTIONS = ("ratios", "backends", "alternatives", "scaling", "batches", "profile", "autotune", "objectives")
BACKENDS = ("eager", "graph", "compile", "compile+graph")
SAMPLED_BY = ("eager", "graph", "compile+graph")
KINDS = ("ddp", "fsdp")
TRAINED = ("unet", "dit_b2")
IN_JAX = tuple(name for name in MODELS if name.startswith(("unet", "dit")))
RUN_BY = "Way to run the network; may be repeated. All if not given; on a CPU only eager."
TRANSFERS = ("auto", "copies", "nccl")
PRECISION, BY = "fp32|tf32|bf16", "|".join(BACKENDS)  # as help shows them
MOST_AVERAGES = 5

Precision = Annotated[str, among(PRECISION, "Precision of the network's matrix products."), PRECISIONS]
ChannelsLast = Annotated[
    bool, typer.Option("--channels-last", help="Use the channels-last memory format for convolutions.")
]
Ratios = Annotated[
    tuple[float, ...], typer.Option("--ratio", help="Fraction of the samples with r != t; may be repeated.")
]
Averages = Annotated[int, typer.Option(min=0, help="Number of weight averages (EMA) in a full step.")]


@dataclass(frozen=True)
class StepOptions(CaseOptions):
    """Compare MeanFlow's training step with flow matching's, with alternatives, and with the roofline bound."""

    device: Device = "auto"
    precision: Annotated[
        str,
        among(PRECISION, "Precision of products; weights stay fp32. tf32 needs CUDA; bf16 uses autocast."),
        PRECISIONS,
    ] = "fp32"
    model: Annotated[str, among("unet|song_unet|dit_b4|...", "The network to train."), MODELS] = "unet"
    batch_size: Annotated[int, typer.Option(min=1, help="Number of images per step.")] = 64
    sections: Annotated[
        Names, among("|".join((*SECTIONS, "all")), "Table to measure; may be repeated.", "--section"), SECTIONS
    ] = ("ratios",)
    backends: Annotated[
        Names,
        among(BY, "Way to run a step; may be repeated. All if not given; on a CPU only eager.", "--backend"),
        BACKENDS,
    ] = ()
    full_step: Annotated[bool, typer.Option("--full-step", help="Include fused AdamW and weight averages.")] = False
    averages: Averages = 3
    channels_last: ChannelsLast = False
    dropout: Annotated[bool, typer.Option("--dropout", help="Use the preset's dropout instead of none.")] = False
    only: Annotated[
        Names, among("TEXT", "Part of the names of rows to measure, besides flow matching. All if not given.")
    ] = ()
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes that compile at once.")] = 1
    seconds: Seconds = 200.0

    def __post_init__(self) -> None:
        """Check the names; `all` stands for every section."""
        if "all" in self.sections:
            object.__setattr__(self, "sections", SECTIONS)
        super().__post_init__()
        _check_averages(self.averages)


@dataclass(frozen=True)
class FrameworkOptions(CaseOptions):
    """Compare a whole MeanFlow step by fullstride in PyTorch with the same network and loss in JAX."""

    device: Device = "auto"
    precision: Precision = "fp32"
    model: Annotated[str, among("unet|dit_b4|...", "The network to train."), IN_JAX] = "unet"
    batch_size: Annotated[int, typer.Option(min=1, help="Number of images per step.")] = 64
    ratios: Ratios = (1.0, 0.75, 0.25)
    jobs: Annotated[int, typer.Option(min=1, help="Number of steps of one framework that compile at once.")] = 1
    seconds: Seconds = 600.0

    def __post_init__(self) -> None:
        """Check the names and the ratios."""
        super().__post_init__()
        _check_ratios(self.ratios)


@dataclass(frozen=True)
class SamplingOptions(CaseOptions):
    """Compare sampling by MeanFlow's steps and by Euler's, of a batch or a set, with the roofline bound."""

    device: Device = "auto"
    precision: Precision = "fp32"
    model: Annotated[str, among("unet|song_unet|dit_b4|...", "The network that generates."), MODELS] = "unet"
    batches: Annotated[
        tuple[int, ...],
        typer.Option(
            "--batch-size",
            help="Number of images per forward pass; may be repeated. 1 to 512 if not given; on a CPU to 16.",
        ),
    ] = ()
    backends: Annotated[Names, among("|".join(SAMPLED_BY), RUN_BY, "--backend"), SAMPLED_BY] = ()
    channels_last: ChannelsLast = False
    seconds: Seconds = 200.0

    def __post_init__(self) -> None:
        """Check the names and the sizes."""
        super().__post_init__()
        if any(batch < 1 for batch in self.batches):
            raise ConfigError(f"--batch-size: {', '.join(map(str, self.batches))}, expected at least 1 each")


@dataclass(frozen=True)
class ScalingOptions(CaseOptions):
    """Compare training steps on several GPUs with one: time, transfers, and the memory of a large network."""

    device: Device = "auto"
    precision: Precision = "bf16"
    backend: Annotated[str, among(BY, "Way to run a step."), BACKENDS] = "compile+graph"
    models: Annotated[Names, among("unet|dit_b2|...", "Network to train; may be repeated.", "--model"), MODELS] = (
        TRAINED
    )
    ratios: Ratios = (1.0, 0.25)
    kinds: Annotated[Names, among("ddp|fsdp", "Kind of data parallelism; may be repeated.", "--kind"), KINDS] = KINDS
    transfers: Annotated[
        Names, among("auto|copies|nccl", "Transport of gradients; may be repeated. On a CPU only gloo."), TRANSFERS
    ] = ("auto", "nccl")
    processes: Annotated[
        int, typer.Option(min=0, help="Largest number of processes; 0 for one per GPU, or two on a CPU.")
    ] = 0
    batch_size: Annotated[int, typer.Option(min=1, help="Number of images per GPU.")] = 64
    averages: Averages = 3
    largest: Annotated[str, among("MODEL", "Network for measuring memory; empty for none."), ("", *MODELS)] = "dit_xl2"
    only: Annotated[
        Names, among("TEXT", "Part of the names of what to measure, such as 'unet', 'ratio 25%' or 'memory'.")
    ] = ()
    seconds: Seconds = 300.0

    def __post_init__(self) -> None:
        """Check the names and the ratios."""
        super().__post_init__()
        _check_averages(self.averages)
        _check_ratios(self.ratios)


@dataclass(frozen=True)
class LoaderOptions(CaseOptions):
    """Measure the loader alone in records per second: from memory, image files and latents to the device."""

    device: Device = "auto"
    batch_size: Annotated[int, typer.Option(min=1, help="Number of records per batch.")] = 256
    workers: Annotated[
        int | None, typer.Option(min=0, help="Largest number of processes to try; all cores if not given.")
    ] = None


# A process's part of `cifar10_v1`, which eight make together, in the memory order that is faster.
RECIPE = {"preset": "cifar10_v1", "data.batch_size": "128", "gradient_accumulation_steps": "1", "channels_last": "true"}
PEER_PRECISIONS = {"cuda": ("bf16", "tf32"), "cpu": ("fp32",), "mps": ("fp32",)}
PEER_BACKENDS = {"cuda": "compile+graph", "cpu": "eager", "mps": "eager"}


@dataclass(frozen=True)
class PeerOptions(CaseOptions):
    """Compare CIFAR-10's whole training step with that of the official PyTorch code in its own loop."""

    official: Annotated[
        Path, typer.Option(metavar="PATH", help="Folder with a checkout of github.com/Gsunshine/py-meanflow.")
    ]
    device: Device = "auto"
    settings: Annotated[
        Names, typer.Argument(metavar="KEY=VALUE", help="Settings of the training, as for `meanflow train`.")
    ] = ()
    precisions: Annotated[
        Names,
        among(
            PRECISION,
            "Precision of fullstride's steps; may be repeated. bf16 and tf32 on a GPU if not given.",
            "--precision",
        ),
    ] = ()
    backend: Annotated[
        str | None,
        among(
            BY,
            "Way to run fullstride's steps: compile+graph on a GPU, eager on a CPU. Official steps follow it.",
        ),
    ] = None
    steps: Annotated[
        int, typer.Option(min=1, help="Number of timed steps of each code; averages are updated every 16.")
    ] = 48
    seconds: Seconds = 600.0

    def on(self, kind: str) -> "PeerOptions":
        """Return the options with defaults for a kind of device (cuda, cpu or mps); ConfigError if the official
        code does not support it.
        """
        # It loads PyTorch, which the command line need not.
        from benchmarks.experiments.meanflow.official_code import check_device

        check_device(self.official, kind)
        precisions = self.precisions or PEER_PRECISIONS[kind]
        return replace(self, precisions=precisions, backend=self.backend or PEER_BACKENDS[kind])

    @property
    def recipe(self) -> list[str]:
        """Settings of the training, as `key=value`; given ones override the recipe's."""
        given = {text.partition("=")[0] for text in self.settings}
        return [*(f"{key}={value}" for key, value in RECIPE.items() if key not in given), *self.settings]


def _check_averages(count: int) -> None:
    if count > MOST_AVERAGES:
        raise ConfigError(f"--averages={count}: expected at most {MOST_AVERAGES}")


def _check_ratios(ratios: tuple[float, ...]) -> None:
    if not all(0 <= ratio <= 1 for ratio in ratios):
        raise ConfigError(f"--ratio={ratios}: expected fractions in [0, 1]")


def counts(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... below `most`, and `most`."""
    return tuple(sorted({most, *(2**i for i in range(most.bit_length()) if 2**i < most)}))
