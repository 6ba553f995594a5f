"""`fullstride meanflow ...`; each command imports what it runs when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from fullstride.cli.help import App
from fullstride.cli.meanflow_convert import encode, export
from fullstride.cli.meanflow_plan import plan
from fullstride.cli.meanflow_settings import CHOICES, choices, preset_lines, settings, show_presets
from fullstride.cli.options import Device, announce
from fullstride.cli.settings import completing, show_settings
from fullstride.errors import ConfigError
from fullstride.meanflow.config.recipes import RECIPES
from fullstride.process import torchrun
from fullstride.process.signals import leaving_on_sigterm
from fullstride.runs.next_steps import command, show_next_steps

app = App(
    "Train one-step image generators, sample them.",
    {
        "Train": "demo presets keys plan train",
        "Use a trained run": "sample evaluate consistency",
        "Convert": "encode export",
    },
)

LISTS = [("preset", RECIPES), *CHOICES.items()]
EPILOG = (
    "Presets and groups\n"
    + "\n".join(f"{group}=  {', '.join(names)}" for group, names in LISTS)
    + "\n\n`fullstride meanflow presets` shows the source of each preset, `fullstride meanflow keys` lists every key."
)

Checkpoint = Annotated[
    Path,
    typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Folder of a run (its newest checkpoint) or of a checkpoint."),
]
NumSamples = Annotated[
    int, typer.Option(min=0, help="Number of images to generate; 0 means as configured, or as many as were held out.")
]
AverageDecay = Annotated[
    float | None, typer.Option("--ema", help="Decay of the averaged weights to use; by default the run's first.")
]
FeatureNames = Annotated[
    list[str] | None,
    typer.Option(
        "--features",
        help="Feature network: classifier, efficientnet_lite0 or inception; may be repeated; by default as configured.",
    ),
]
InceptionWeights = Annotated[
    Path | None, typer.Option(help="File of Inception's weights, for --features inception; by default as configured.")
]
ScoredPrecision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="fp32|tf32|bf16",
        help="Precision of the network's matrix products; by default as configured.",
    ),
]
ScoredBackend = Annotated[
    str | None,
    typer.Option(
        "--backend", metavar="auto|eager|graph", help="Backend that runs the network; by default as configured."
    ),
]
ScoredBatch = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Number of images per forward pass; by default as configured.")
]
DataPath = Annotated[str, typer.Option(help="Path of the data, if they were moved since the run.")]

SCORING = {
    "Scores": "num_samples features inception_weights data_path ema",
    "Execution": "device precision backend batch_size",
}

app.command(
    "encode",
    sections={
        "Latents": "vae out image_size flip half holdout shard_size",
        "Execution": "device batch_size workers",
    },
)(encode)
app.command("export")(export)
app.command("plan")(plan)


@app.command(epilog=EPILOG)
def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            autocompletion=completing(choices),
            help="preset=recipe, group=choice or key=value, e.g. model=unet_tiny epochs=20.",
        ),
    ] = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="One run for each combination of values, e.g. seed=0,1,2.")
    ] = False,
) -> None:
    """Train a run.

    The run is stored in output_dir/run_name. When stopped it saves; resume=true continues it.
    """
    with leaving_on_sigterm():
        from fullstride.meanflow.config.overrides import read, sweep
        from fullstride.meanflow.training.trainer import train

        if multirun:
            if torchrun.world_size() > 1:
                raise ConfigError(f"--multirun in one of {torchrun.world_size()} processes, expected one process")
            from fullstride.cli.meanflow_sweep import run_all

            run_all(sweep(overrides or []))
            return
        config = read(overrides or [])
        announce(config.device)
        run = train(config)
        if torchrun.rank() == 0:
            typer.echo(f"trained: {run}")
            show_next_steps(
                {run / "checkpoints": "the weights", run / "metrics.jsonl": "loss and evaluations"},
                {
                    command("meanflow", "sample", run): "generate images",
                    command("meanflow", "evaluate", run): "score them against the held-out split",
                    command("report", "--runs", run): "draw the curves of metrics.jsonl",
                },
            )


@app.command()
def presets(
    name: Annotated[
        str | None,
        typer.Argument(
            autocompletion=lambda: list(RECIPES), help="Show the settings of this one; without it, list all."
        ),
    ] = None,
) -> None:
    """List the published recipes, or show one with its source and its settings."""
    if name is None:
        show_presets()
    else:
        typer.echo("\n".join(preset_lines(name)))


@app.command()
def keys(
    text: Annotated[str, typer.Argument(help="List only keys with this in their name, such as loss or dropout.")] = "",
) -> None:
    """List what `train` can be given: keys, defaults, meanings."""
    show_settings(settings(), text)


@app.command(
    sections={
        "Images": "sampler steps num seed label ema out vae",
        "Execution": "device precision backend batch_size",
    }
)
def sample(
    checkpoint: Checkpoint,
    sampler: Annotated[
        str,
        typer.Option(metavar="meanflow|euler|midpoint|heun|rk4|dopri5", help="Sampler that turns noise into images."),
    ] = "meanflow",
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Number of sampler steps; by default 1 for meanflow; dopri5 chooses its own."),
    ] = None,
    num: Annotated[int, typer.Option(min=1, help="Number of images.")] = 64,
    seed: Annotated[int, typer.Option(help="Random seed; image i depends on the seed and i alone.")] = 0,
    label: Annotated[int | None, typer.Option(help="Class of all images; by default all classes.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the PNG files; by default in the run's folder, under samples."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Number of images per forward pass; does not change the images.")
    ] = 512,
    device: Device = "auto",
    precision: Annotated[
        str,
        typer.Option(
            metavar="fp32|tf32|bf16", help="Precision of the network's matrix products; tf32 and bf16 are faster."
        ),
    ] = "fp32",
    backend: Annotated[
        str,
        typer.Option(
            metavar="auto|eager|graph",
            help="Backend that runs the network; graph: one launch per evaluation; auto: graph on CUDA.",
        ),
    ] = "auto",
    ema: AverageDecay = None,
    vae: Annotated[
        Path | None, typer.Option(help="Folder of a diffusers AutoencoderKL that decodes latents to images.")
    ] = None,
) -> None:
    """Generate images: PNG files and grids.

    A class-conditional run also gets a grid of its classes; a run on latents leaves latents.safetensors.
    """
    from fullstride.meanflow.sampling.generate import sample_command

    announce(device)
    sample_command(
        checkpoint,
        sampler=sampler,
        steps=1 if steps is None and sampler == "meanflow" else steps,
        num=num,
        seed=seed,
        label=label,
        out=out,
        batch_size=batch_size,
        device=device,
        precision=precision,
        backend=backend,
        ema=ema,
        vae=vae,
    )


def _add_scoring(name: str, about: str, **fixed: bool) -> None:
    def score(
        checkpoint: Checkpoint,
        num_samples: NumSamples = 0,
        device: Device = "auto",
        ema: AverageDecay = None,
        features: FeatureNames = None,
        inception_weights: InceptionWeights = None,
        data_path: DataPath = "",
        precision: ScoredPrecision = None,
        batch_size: ScoredBatch = None,
        backend: ScoredBackend = None,
    ) -> None:
        from fullstride.meanflow.evaluation.checkpoint import evaluate_command

        announce(device)
        evaluate_command(
            checkpoint,
            **fixed,
            num_samples=num_samples,
            device=device,
            ema=ema,
            features=features,
            inception_weights=inception_weights,
            data_path=data_path,
            precision=precision,
            batch_size=batch_size,
            backend=backend,
        )

    score.__doc__ = about
    app.command(name, sections=SCORING)(score)


_add_scoring("evaluate", "Score MeanFlow samples, compared with training images.")
_add_scoring(
    "consistency",
    "Compare one-step samples with ODE solvers.\n\nEuler and RK4 solve with the same weights: does one MeanFlow step "
    "land where they do?",
    consistency=True,
)


@app.command()
def demo(
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of passes over the data; by default 130, three minutes on two CPU cores."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for pictures, metrics.json and checkpoint.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Random seed of weights, data order, noise and times.")] = 0,
) -> None:
    """Train on digits, compare with solvers.

    Takes minutes on the CPU; writes pictures, metrics.json and a checkpoint. If stopped, the same command continues it.
    """
    with leaving_on_sigterm():
        from fullstride.meanflow.demo import run_demo

        run_demo(out, epochs=epochs, seed=seed)
