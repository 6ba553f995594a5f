"""`fullstride meanflow ...`; each command imports what it runs when it runs."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fullstride.cli.from_dataclass import command_from
from fullstride.cli.help import App
from fullstride.cli.meanflow_plan import plan
from fullstride.cli.meanflow_settings import CHOICES, choices, preset_lines, settings, show_presets
from fullstride.cli.running import announce
from fullstride.cli.settings import completing, show_settings
from fullstride.errors import ConfigError
from fullstride.meanflow.config.commands import (
    AverageOptions,
    ConsistencyOptions,
    EncodeOptions,
    ExportOptions,
    SampleOptions,
    ScoreOptions,
)
from fullstride.meanflow.config.recipes import RECIPES
from fullstride.process import torchrun
from fullstride.process.signals import leaving_on_sigterm
from fullstride.runs.next_steps import command, show_next_steps

app = App(
    "Train one-step image generators, sample them.",
    {
        "Train": "demo presets keys plan train",
        "Use a trained run": "sample evaluate consistency",
        "Convert": "average encode export",
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
        from fullstride.cli.meanflow_sweep import ADVICE, run_all
        from fullstride.meanflow.config.overrides import read, sweep
        from fullstride.meanflow.training.outcome import not_finite
        from fullstride.meanflow.training.trainer import train

        if multirun:
            if torchrun.world_size() > 1:
                raise ConfigError(f"--multirun in one of {torchrun.world_size()} processes, expected one process")
            run_all(sweep(overrides or []))
            return
        config = read(overrides or [])
        announce(config.device)
        run = train(config)
        if torchrun.rank() == 0:
            if why := not_finite(run):
                raise FloatingPointError(f"{run} diverged: {why}; {ADVICE}")
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


def _encode(
    options: EncodeOptions,
    pictures: Annotated[Path, typer.Argument(help="Folder of images, in the layout of data=image_folder.")],
) -> None:
    from fullstride.meanflow.sampling.encode import encode_command

    announce(options.device)
    encode_command(pictures, options)


def _sample(options: SampleOptions, checkpoint: Checkpoint) -> None:
    from fullstride.meanflow.sampling.generate import sample_command

    announce(options.device)
    steps = 1 if options.steps is None and options.sampler == "meanflow" else options.steps
    sample_command(checkpoint, replace(options, steps=steps))


def _score(options: ScoreOptions, checkpoint: Checkpoint) -> None:
    from fullstride.meanflow.evaluation.checkpoint import evaluate_command

    announce(options.device)
    evaluate_command(checkpoint, options)


def _export(options: ExportOptions, checkpoint: Checkpoint) -> None:
    from fullstride.meanflow.sampling.export import export_command

    announce(options.device)
    export_command(checkpoint, options)


def _average(
    options: AverageOptions,
    run: Annotated[Path, typer.Argument(help="Folder of a run with ema.widths.")],
) -> None:
    from fullstride.meanflow.checkpoints.average import average_command

    average_command(run, options)


SCORING = {
    "Scores": "num_samples features inception_weights data_path ema",
    "Execution": "device precision backend batch_size",
}
SAMPLING = {
    "Images": "sampler steps num seed label guidance no_class conditions ema out vae",
    "Execution": "device precision backend batch_size",
}
ENCODING = {
    "Latents": "vae out image_size flip half holdout shard_size",
    "Execution": "device batch_size workers",
}
app.command("sample", sections=SAMPLING)(command_from(_sample, SampleOptions))
app.command("evaluate", sections=SCORING)(command_from(_score, ScoreOptions))
app.command("consistency", sections=SCORING)(command_from(_score, ConsistencyOptions))
app.command("encode", sections=ENCODING)(command_from(_encode, EncodeOptions))
app.command("export")(command_from(_export, ExportOptions))
app.command("average")(command_from(_average, AverageOptions))


@app.command()
def demo(
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of passes over the data; by default 118, three minutes on two CPU cores."),
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
