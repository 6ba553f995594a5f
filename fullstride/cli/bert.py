"""`fullstride bert ...`; each command imports what it runs when it runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fullstride.bert.training.settings import SHORT, TrainSettings
from fullstride.cli.help import App
from fullstride.cli.settings import completing, offers, settings_in, show_settings
from fullstride.errors import ConfigError
from fullstride.process.signals import leaving_on_sigterm
from fullstride.runs.next_steps import command, show_next_steps

app = App("Train BERT on masked language modelling, use it.", {"Commands": "train keys evaluate fill export"})


def choices() -> Mapping[str, Sequence[str]]:
    """Return the values to offer for each key: its choices, else the default."""
    offered = offers(TrainSettings())
    return offered | {short: offered[key] for short, key in SHORT.items()}


EPILOG = (
    "Data and sizes\n"
    + "\n".join(f"{short}=  {', '.join(offers(TrainSettings())[key])}" for short, key in SHORT.items())
    + "\n\ndevice=cpu|gpu; cuda is gpu. `fullstride bert keys` lists every key. For an unknown key the nearest "
    "one is suggested."
)
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        autocompletion=completing(choices),
        help="Settings, e.g. model=mini data=text_files data.path='books/*.txt'.",
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="RUN_OR_WEIGHTS", help="Folder of a run, or of weights.")]


@app.command(epilog=EPILOG)
def train(overrides: Overrides = None) -> None:
    """Train a run; without settings in minutes on a CPU, on the docstrings of the Python that runs it.

    The run is stored in output_dir/run_name. When stopped it saves; resume=true continues it with its own settings.
    """
    with leaving_on_sigterm():
        from fullstride.bert.training.runs import settings_to_train
        from fullstride.bert.training.trainer import train

        run = train(settings_to_train(overrides or []))
        typer.echo(f"trained: {run}")
        show_next_steps(
            {run / "checkpoints": "the weights", run / "metrics.jsonl": "loss and evaluations"},
            {
                command("bert", "fill", "Return the [MASK] of the list.", "--run", run): "predict a masked word",
                command("bert", "evaluate", run): "score held-out text",
                command("bert", "export", run, "weights"): "weights that transformers reads",
            },
        )


@app.command()
def keys(
    text: Annotated[str, typer.Argument(help="List only keys with this in their name, such as data or dropout.")] = "",
) -> None:
    """List what `train` can be given: keys, defaults, meanings."""
    show_settings(settings_in(TrainSettings()), text)


@app.command()
def fill(
    text: Annotated[str, typer.Argument(help="Text with one [MASK] or more: 'Paris is the [MASK] of France.'")],
    run: Annotated[Path | None, typer.Option(help="Folder of a run.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Folder with config.json, model.safetensors and a vocabulary.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of candidates for each [MASK].")] = 5,
) -> None:
    """Predict the words at [MASK]."""
    folder = run or weights
    if folder is None or (run and weights):
        raise ConfigError("fill: expected either --run FOLDER or --weights FOLDER")
    from fullstride.bert.model.fill import fill
    from fullstride.bert.training.runs import load_trained

    found = load_trained(folder)
    for place in fill(found.model, found.tokenizer, text, top):
        for candidate in place:
            typer.echo(f"{candidate.probability:7.2%}  {candidate.token:<16}  {candidate.text}")


@app.command()
def evaluate(folder: Folder, overrides: Overrides = None) -> None:
    """Score held-out text: masked loss, accuracy, bits per byte.

    By default a run is scored on its own held-out text, weights on that of the given data.
    """
    from fullstride.bert.training.runs import evaluate_command

    typer.echo(str(evaluate_command(folder, overrides or [])))


@app.command()
def export(
    folder: Folder, out: Annotated[Path, typer.Argument(help="Folder to make, for transformers and `model.init`.")]
) -> None:
    """Write a run's newest weights and its tokenizer as transformers reads them."""
    from fullstride.bert.training.runs import export, load_trained

    typer.echo(f"exported: {export(load_trained(folder), out)}")
