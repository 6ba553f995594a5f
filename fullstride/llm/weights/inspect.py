"""Tables of the contents of a model's files."""

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from fullstride.llm.weights.loading import load
from fullstride.llm.weights.settings import in_words


def show(source: str) -> None:
    """Print a model's configuration and tensors.

    Raises:
        ConfigError: see `load`.

    """
    loaded = load(source)
    console = Console()
    console.print(str(loaded.path), highlight=False, soft_wrap=True)
    settings = Table("setting", "value")
    for name, value in asdict(loaded.config).items():
        settings.add_row(name, str(value))
    settings.add_row("tokenizer", f"{loaded.tokenizer.backend.get_vocab_size()} tokens")
    settings.add_row("suggested sampling", in_words(loaded.sampling) or "none")
    settings.add_row("chat template", "yes" if loaded.tokenizer.template else "no")
    tensors, parameters = Table("tensor", "shape", "stored as"), loaded.parameters
    for name in parameters:
        tensors.add_row(name, " x ".join(map(str, parameters.shape(name))), parameters.kind(name))
    console.print(settings)
    console.print(tensors)
    numbers, size = parameters.nbytes // parameters.dtype.itemsize, f"{parameters.nbytes / 1e6:,.1f} MB"
    said = f"{len(parameters)} tensors, {numbers:,} parameters, {size} as {loaded.config.dtype}"
    console.print(said, highlight=False)
