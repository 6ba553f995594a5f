"""`python -m benchmarks ...`: a case beside its floor; each command imports what it measures when it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cases.meanflow.peer_options import STEPS as PEER_STEPS
from benchmarks.cases.meanflow.peer_options import Options as PeerOptions
from benchmarks.cases.meanflow.sampling_options import BACKENDS as SAMPLED_BY
from benchmarks.cases.meanflow.sampling_options import Options as SamplingOptions
from benchmarks.cases.meanflow.scaling_options import Options as ScalingOptions
from benchmarks.cases.meanflow.step_options import BACKENDS, SECTIONS, Options
from benchmarks.cli.llm import engine, paged_attention
from benchmarks.cli.train_step import train_step
from benchmarks.harness.result_paths import RESULTS
from benchmarks.harness.stop_requests import ending_early
from fullstride.cli.help import App
from fullstride.cli.options import Device, Results, announce
from fullstride.errors import one_of

GROUPS = {
    "MeanFlow": "meanflow-step meanflow-sampling meanflow-scaling meanflow-loader meanflow-peer",
    "Forward-mode derivatives": "jvp-attention jvp-norms",
    "Training steps in JAX": "train-step",
    "Language models": "llm paged-attention",
}
app = App("Measure a case beside its floor.", GROUPS)
app.command("train-step")(train_step)

IMPLEMENTATIONS = ("auto", "plain", "triton")
Seconds = Annotated[
    float,
    typer.Option(min=0, help="Nothing is begun after them, nor after Ctrl-C; what is left out is named."),
]


@app.command("meanflow-step")
def meanflow_step(
    device: Device = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Images a step.")] = 64,
    precision: Annotated[
        str,
        typer.Option(
            metavar="fp32|tf32|bf16", help="Of products; weights stay fp32, tf32 is CUDA's, bf16 is autocast."
        ),
    ] = "fp32",
    model: Annotated[str, typer.Option(metavar="unet|song_unet|dit_b4|...", help="The network to train.")] = "unet",
    section: Annotated[
        list[str] | None,
        typer.Option(metavar="|".join((*SECTIONS, "all")), help="Which tables, one each; ratios unless given."),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(BACKENDS), help="How a step runs, one each; all unless given, on a CPU eager alone."
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Rows whose name has it, and flow matching; all if absent.")
    ] = None,
    full_step: Annotated[bool, typer.Option("--full-step", help="With fused AdamW and averages.")] = False,
    averages: Annotated[int, typer.Option(min=0, help="Of the weights, in a full step.")] = 3,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Memory order of convolutions.")] = False,
    dropout: Annotated[bool, typer.Option("--dropout", help="As the preset says, instead of none.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile at once.")] = 1,
    seconds: Seconds = 200.0,
    out: Results = RESULTS,
) -> None:
    """MeanFlow's training step beside flow matching's, its alternatives, and the arithmetic's floor."""
    asked = section or ["ratios"]
    options = Options(
        device=device,
        precision=precision,
        model=model,
        batch_size=batch_size,
        sections=SECTIONS if "all" in asked else tuple(dict.fromkeys(asked)),
        backends=tuple(dict.fromkeys(backend or ())),
        full_step=full_step,
        averages=averages,
        channels_last=channels_last,
        dropout=dropout,
        only=tuple(only or ()),
        jobs=jobs,
        seconds=seconds,
    )
    from benchmarks.cases.meanflow.step import run

    announce(device)
    with ending_early():
        run(options, out)


@app.command("meanflow-sampling")
def meanflow_sampling(
    device: Device = "auto",
    batch_size: Annotated[
        list[int] | None,
        typer.Option(help="Images of a forward pass, may be given again; 1 to 512 if absent, on a CPU to 16."),
    ] = None,
    precision: Annotated[str, typer.Option(metavar="fp32|tf32|bf16", help="Of the network's products.")] = "fp32",
    model: Annotated[
        str, typer.Option(metavar="unet|song_unet|dit_b4|...", help="The network that generates.")
    ] = "unet",
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(SAMPLED_BY),
            help="How the network runs, may be given again; all if absent.",
        ),
    ] = None,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Memory order of convolutions.")] = False,
    seconds: Seconds = 200.0,
    out: Results = RESULTS,
) -> None:
    """Images by MeanFlow's steps and by Euler's, a batch or a set of them, beside the floor of their evaluations."""
    options = SamplingOptions(
        device=device,
        precision=precision,
        model=model,
        batches=tuple(dict.fromkeys(batch_size or ())),
        backends=tuple(dict.fromkeys(backend or ())),
        channels_last=channels_last,
        seconds=seconds,
    )
    from benchmarks.cases.meanflow.sampling import run

    announce(device)
    with ending_early():
        run(options, out)


@app.command("meanflow-scaling")
def meanflow_scaling(
    device: Device = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Images a GPU.")] = 64,
    precision: Annotated[str, typer.Option(metavar="fp32|tf32|bf16", help="Of products.")] = "bf16",
    model: Annotated[
        list[str] | None, typer.Option(metavar="unet|dit_b2|...", help="Networks to train; unet and dit_b2 if absent.")
    ] = None,
    ratio: Annotated[
        list[float] | None, typer.Option(help="Shares of the samples with r != t; 1 and 0.25 if absent.")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(metavar="ddp|fsdp", help="What is shared; both if absent.")] = None,
    transfers: Annotated[
        list[str] | None,
        typer.Option(metavar="auto|copies|nccl", help="What gradients travel by; auto and nccl if absent."),
    ] = None,
    backend: Annotated[str, typer.Option(metavar="|".join(BACKENDS), help="How a step runs.")] = "compile+graph",
    averages: Annotated[int, typer.Option(min=0, help="Of the weights.")] = 3,
    processes: Annotated[int, typer.Option(min=0, help="Most of them; 0 for one on each GPU.")] = 0,
    largest: Annotated[
        str, typer.Option(metavar="MODEL", help="Whose memory is measured; empty for none.")
    ] = "dit_xl2",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="What is measured, by a part of its name: 'unet', 'ratio 25%', 'memory'."),
    ] = None,
    seconds: Seconds = 300.0,
    out: Results = RESULTS,
) -> None:
    """Training steps on several GPUs beside those on one: time, transfers, and the memory of a large network."""
    chosen: dict[str, Any] = {"models": model, "ratios": ratio, "kinds": kind, "transfers": transfers, "only": only}
    options = ScalingOptions(
        device=device,
        precision=precision,
        backend=backend,
        processes=processes,
        batch_size=batch_size,
        averages=averages,
        largest=largest,
        seconds=seconds,
        **{key: tuple(dict.fromkeys(values)) for key, values in chosen.items() if values},
    )
    from benchmarks.cases.meanflow.scaling import run

    announce(device)
    with ending_early():
        run(options, out)


@app.command("meanflow-loader")
def meanflow_loader(
    device: Device = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Records a batch.")] = 256,
    workers: Annotated[int | None, typer.Option(min=0, help="Most processes to try; all cores unless given.")] = None,
    out: Results = RESULTS,
) -> None:
    """Records a second that the loader alone brings to the device, from memory, pictures and latents."""
    from benchmarks.cases.meanflow.loader import run

    announce(device)
    run(device=device, batch_size=batch_size, workers=workers, out=out)


@app.command("meanflow-peer")
def meanflow_peer(
    official: Annotated[Path, typer.Option(metavar="PATH", help="A checkout of github.com/Gsunshine/py-meanflow.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Of the training, as `meanflow train` has them."),
    ] = None,
    device: Device = "auto",
    precision: Annotated[
        list[str] | None, typer.Option(metavar="fp32|tf32|bf16", help="Of our steps, one each; on a GPU bf16 and tf32.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="|".join(BACKENDS), help="Of our steps; compile+graph on a GPU, eager on a CPU."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed of each code.")] = PEER_STEPS,
    seconds: Seconds = 600.0,
    out: Results = RESULTS,
) -> None:
    """CIFAR-10's whole training step beside the official PyTorch code's own, by its own loop."""
    announce(device)
    from benchmarks.cases.meanflow.peer import run

    chosen: dict[str, Any] = {"steps": steps, "seconds": seconds, "settings": tuple(settings or ()), "backend": backend}
    chosen["precisions"] = tuple(dict.fromkeys(precision or ()))
    with ending_early():
        run(PeerOptions(official, device, **chosen), out)


Implementation = Annotated[
    str, typer.Option(metavar="auto|plain|triton", help="Of our ops: plain PyTorch operations, or Triton kernels.")
]
Jobs = Annotated[int, typer.Option(min=0, help="Processes that compile kernels beforehand.")]


@app.command("jvp-attention")
def jvp_attention(
    device: Device = "auto",
    precision: Annotated[
        str,
        typer.Option(metavar="bf16|fp16|fp32|tf32|tf32x3", help="Of the tensors; tf32 and tf32x3 of products of fp32."),
    ] = "bf16",
    implementation: Implementation = "auto",
    shapes: Annotated[
        str | None,
        typer.Option(metavar="small|reference|speed|large|odd|all", help="Sizes; small on a CPU, else large, the two."),
    ] = None,
    seconds: Seconds = 600.0,
    jobs: Jobs = 8,
    out: Results = RESULTS,
) -> None:
    """Attention with its forward derivative, and both backward passes, beside PyTorch's own."""
    one_of("--implementation", implementation, IMPLEMENTATIONS)
    from benchmarks.cases.jvp.attention import BENCH

    announce(device)
    chosen: dict[str, Any] = {"precision": precision, "implementation": implementation, "shapes": shapes}
    with ending_early():
        BENCH.run(device=device, **chosen, seconds=seconds, jobs=jobs, out=out)


@app.command("jvp-norms")
def jvp_norms(
    device: Device = "auto",
    precision: Annotated[str, typer.Option(metavar="bf16|fp16|fp32", help="Of the activations.")] = "bf16",
    implementation: Implementation = "auto",
    shapes: Annotated[
        str | None, typer.Option(metavar="small|models|odd|all", help="Sizes; small on a CPU, else models.")
    ] = None,
    seconds: Seconds = 180.0,
    jobs: Jobs = 8,
    out: Results = RESULTS,
) -> None:
    """Norms with their forward derivatives, in bytes a second beside a copy's."""
    one_of("--implementation", implementation, IMPLEMENTATIONS)
    from benchmarks.cases.jvp.norms import BENCH

    announce(device)
    chosen: dict[str, Any] = {"precision": precision, "implementation": implementation, "shapes": shapes}
    with ending_early():
        BENCH.run(device=device, **chosen, seconds=seconds, jobs=jobs, out=out)


app.command("llm")(engine)
app.command("paged-attention")(paged_attention)
