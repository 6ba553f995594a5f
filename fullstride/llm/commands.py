"""`fullstride llm ...`; each command imports what it runs when it runs."""

from typing import Annotated

import typer

from fullstride.llm.generate_command import generate
from fullstride.llm.server.command import serve

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Serve language models.")
app.command()(generate)
app.command()(serve)

Source = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder with config.json and safetensors, a GGUF file, or a known name."),
]


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a known model, e.g. smollm2.")],
) -> None:
    """Fetch a known model into the cache."""
    from fullstride.errors import one_of
    from fullstride.llm.weights.loading import find
    from fullstride.llm.weights.names import MODELS

    one_of("model", name, MODELS)
    typer.echo(find(name))


@app.command()
def inspect(source: Source) -> None:
    """Show a model's configuration and tensors."""
    from fullstride.llm.weights.inspect import show

    show(source)
