"""What a model's files hold, as tables."""

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from fullstride.llm.weights.loading import Loaded, load
from fullstride.llm.weights.suggested import in_words


def show(source: str) -> None:
    """Print a model's configuration and tensors.

    Raises:
        ConfigError: see `load`.

    """
    loaded = load(source)
    console = Console()
    console.print(str(loaded.path), highlight=False, soft_wrap=True)
    console.print(_settings(loaded))
    console.print(_tensors(loaded))
    numbers = loaded.parameters.nbytes // loaded.parameters.dtype.itemsize
    console.print(
        f"{len(loaded.parameters)} tensors, {numbers:,} parameters, {loaded.parameters.nbytes / 1e6:,.1f} MB as"
        f" {loaded.config.dtype}",
        highlight=False,
    )


def _settings(loaded: Loaded) -> Table:
    table = Table("setting", "value")
    for name, value in asdict(loaded.config).items():
        table.add_row(name, str(value))
    table.add_row("tokenizer", f"{loaded.tokenizer.backend.get_vocab_size()} tokens")
    table.add_row("suggested sampling", in_words(loaded.sampling) or "none")
    table.add_row("chat template", "yes" if loaded.tokenizer.template else "no")
    return table


def _tensors(loaded: Loaded) -> Table:
    table = Table("tensor", "shape", "stored as")
    for name in loaded.parameters:
        table.add_row(name, " x ".join(map(str, loaded.parameters.shape(name))), loaded.parameters.kind(name))
    return table
