"""Options of the cases `meanflow-...` of `python -m benchmarks`; nothing here needs PyTorch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.options import CaseOptions, Names, Seconds, among
from fullstride.cli.options import Device
from fullstride.device.precision import PRECISIONS
from fullstride.errors import ConfigError
from fullstride.meanflow.config.presets import MODELS

SECTIONS = ("ratios", "backends", "alternatives", "scaling", "batches", "profile", "autotune")
BACKENDS = ("eager", "graph", "compile", "compile+graph")
SAMPLED_BY = ("eager", "graph", "compile+graph")
KINDS = ("ddp", "fsdp")
TRAINED = ("unet", "dit_b2")
RUN_BY = "How the network runs, may be given again; all if absent, on a CPU eager alone."
TRANSFERS = ("auto", "copies", "nccl")
PRECISION, BY = "fp32|tf32|bf16", "|".join(BACKENDS)  # as help shows them
MOST_AVERAGES = 5

Precision = Annotated[str, among(PRECISION, "Of the network's products."), PRECISIONS]
ChannelsLast = Annotated[bool, typer.Option("--channels-last", help="Memory order of convolutions.")]
Averages = Annotated[int, typer.Option(min=0, help="Of the weights, in a full step.")]


@dataclass(frozen=True)
class StepOptions(CaseOptions):
    """MeanFlow's training step beside flow matching's, its alternatives, and the arithmetic's floor."""

    device: Device = "auto"
    precision: Annotated[
        str, among(PRECISION, "Of products; weights stay fp32, tf32 is CUDA's, bf16 is autocast."), PRECISIONS
    ] = "fp32"
    model: Annotated[str, among("unet|song_unet|dit_b4|...", "The network to train."), MODELS] = "unet"
    batch_size: Annotated[int, typer.Option(min=1, help="Images a step.")] = 64
    sections: Annotated[
        Names, among("|".join((*SECTIONS, "all")), "Which tables, one each.", "--section"), SECTIONS
    ] = ("ratios",)
    backends: Annotated[
        Names, among(BY, "How a step runs, one each; all unless given, on a CPU eager alone.", "--backend"), BACKENDS
    ] = ()
    full_step: Annotated[bool, typer.Option("--full-step", help="With fused AdamW and averages.")] = False
    averages: Averages = 3
    channels_last: ChannelsLast = False
    dropout: Annotated[bool, typer.Option("--dropout", help="As the preset says, instead of none.")] = False
    only: Annotated[Names, among("TEXT", "Rows whose name has it, and flow matching; all if absent.")] = ()
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile at once.")] = 1
    seconds: Seconds = 200.0

    def __post_init__(self) -> None:
        """Check the names; `all` stands for every section."""
        if "all" in self.sections:
            object.__setattr__(self, "sections", SECTIONS)
        super().__post_init__()
        _check_averages(self.averages)


@dataclass(frozen=True)
class SamplingOptions(CaseOptions):
    """Images by MeanFlow's steps and by Euler's, a batch or a set of them, beside the floor of their evaluations."""

    device: Device = "auto"
    precision: Precision = "fp32"
    model: Annotated[str, among("unet|song_unet|dit_b4|...", "The network that generates."), MODELS] = "unet"
    batches: Annotated[
        tuple[int, ...],
        typer.Option(
            "--batch-size", help="Images of a forward pass, may be given again; 1 to 512 if absent, on a CPU to 16."
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
    """Training steps on several GPUs beside those on one: time, transfers, and the memory of a large network."""

    device: Device = "auto"
    precision: Precision = "bf16"
    backend: Annotated[str, among(BY, "How a step runs."), BACKENDS] = "compile+graph"
    models: Annotated[Names, among("unet|dit_b2|...", "Networks to train, one each.", "--model"), MODELS] = TRAINED
    ratios: Annotated[
        tuple[float, ...], typer.Option("--ratio", help="Shares of the samples with r != t, one each.")
    ] = (1.0, 0.25)
    kinds: Annotated[Names, among("ddp|fsdp", "What is shared, one each.", "--kind"), KINDS] = KINDS
    transfers: Annotated[
        Names, among("auto|copies|nccl", "What gradients travel by, one each; on a CPU gloo alone."), TRANSFERS
    ] = ("auto", "nccl")
    processes: Annotated[int, typer.Option(min=0, help="Most of them; 0 for one on each GPU, on a CPU two.")] = 0
    batch_size: Annotated[int, typer.Option(min=1, help="Images a GPU.")] = 64
    averages: Averages = 3
    largest: Annotated[str, among("MODEL", "Whose memory is measured; empty for none."), ("", *MODELS)] = "dit_xl2"
    only: Annotated[
        Names, among("TEXT", "What is measured, by a part of its name: 'unet', 'ratio 25%', 'memory'.")
    ] = ()
    seconds: Seconds = 300.0

    def __post_init__(self) -> None:
        """Check the names and the shares."""
        super().__post_init__()
        _check_averages(self.averages)
        if not all(0 <= ratio <= 1 for ratio in self.ratios):
            raise ConfigError(f"--ratio={self.ratios}: expected shares in [0, 1]")


@dataclass(frozen=True)
class LoaderOptions(CaseOptions):
    """Records a second that the loader alone brings to the device, from memory, pictures and latents."""

    device: Device = "auto"
    batch_size: Annotated[int, typer.Option(min=1, help="Records a batch.")] = 256
    workers: Annotated[int | None, typer.Option(min=0, help="Most processes to try; all cores unless given.")] = None


# A process's part of `cifar10_v1`, which eight make together, in the memory order that is faster.
RECIPE = {"preset": "cifar10_v1", "data.batch_size": "128", "gradient_accumulation_steps": "1", "channels_last": "true"}
PEER_PRECISIONS = {"cuda": ("bf16", "tf32"), "cpu": ("fp32",), "mps": ("fp32",)}
PEER_BACKENDS = {"cuda": "compile+graph", "cpu": "eager", "mps": "eager"}


@dataclass(frozen=True)
class PeerOptions(CaseOptions):
    """CIFAR-10's whole training step beside the official PyTorch code's own, by its own loop."""

    official: Annotated[Path, typer.Option(metavar="PATH", help="A checkout of github.com/Gsunshine/py-meanflow.")]
    device: Device = "auto"
    settings: Annotated[
        Names, typer.Argument(metavar="KEY=VALUE", help="Of the training, as `meanflow train` has them.")
    ] = ()
    precisions: Annotated[
        Names, among(PRECISION, "Of our steps, one each; on a GPU bf16 and tf32 if absent.", "--precision")
    ] = ()
    backend: Annotated[
        str | None, among(BY, "Of our steps; compile+graph on a GPU, eager on a CPU. Theirs are compiled if ours are.")
    ] = None
    steps: Annotated[int, typer.Option(min=1, help="Timed of each code; the averages move every 16.")] = 48
    seconds: Seconds = 600.0

    def on(self, kind: str) -> "PeerOptions":
        """With what is usual on a kind of device, cuda, cpu or mps, where nothing is given; ConfigError if the official
        code makes no step there.
        """
        # It loads PyTorch, which the command line need not.
        from benchmarks.experiments.meanflow.official_code import check_device

        check_device(self.official, kind)
        precisions = self.precisions or PEER_PRECISIONS[kind]
        return replace(self, precisions=precisions, backend=self.backend or PEER_BACKENDS[kind])

    @property
    def recipe(self) -> list[str]:
        """All settings of the training, as `key=value`; those that are given win."""
        given = {text.partition("=")[0] for text in self.settings}
        return [*(f"{key}={value}" for key, value in RECIPE.items() if key not in given), *self.settings]


def _check_averages(count: int) -> None:
    if count > MOST_AVERAGES:
        raise ConfigError(f"--averages={count}: expected at most {MOST_AVERAGES}")


def counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... below `most`, and `most`."""
    return tuple(sorted({most, *(2**i for i in range(most.bit_length()) if 2**i < most)}))
