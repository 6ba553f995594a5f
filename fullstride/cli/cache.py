"""`fullstride cache ...`: what was fetched and computed, and its removal."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from fullstride.cli.help import App

if TYPE_CHECKING:
    from fullstride.assets.cache import Entry

app = App("List or clear fetched files and computed results.", {"Commands": "list clear"})

Names = Annotated[list[str] | None, typer.Argument(metavar="ENTRY", help="Name as shown by `list`; all if absent.")]


@app.command("list")
def show() -> None:
    """List the cache: each entry with its size, its age and what it is."""
    from fullstride.assets.cache import entries, foreign
    from fullstride.assets.fetch import cache_folder

    found = entries()
    typer.echo(f"{cache_folder()}{'' if found else ': no entries of fullstride'}")
    for line in _lines(found):
        typer.echo(line)
    if names := foreign():
        typer.echo(f"not fullstride's, and never cleared: {', '.join(names)}")


def _lines(found: "list[Entry]") -> Iterator[str]:
    """Format a line for each entry, and the total; a table would cut names in a narrow terminal."""
    from fullstride.assets.cache import age

    rows = [(entry.name, decimal(entry.size), age(entry.changed), entry.what) for entry in found]
    rows += [("total", decimal(_size(found)), "", "")] if rows else []
    width = max((len(name) for name, *_ in rows), default=0)
    for name, size, old, what in rows:
        yield f"{name:<{width}}  {size:>9}  {old:>6}  {what}".rstrip()


def _size(found: "list[Entry]") -> int:
    return sum(entry.size for entry in found)


@app.command()
def clear(
    names: Names = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before anything is removed.")] = False,
) -> None:
    """Remove entries of the cache.

    Removed files are fetched or computed again when needed.
    """
    from fullstride.assets.cache import clear as remove
    from fullstride.assets.cache import entries
    from fullstride.assets.fetch import cache_folder

    found = entries(names or ())
    if not found:
        typer.echo(f"{cache_folder()}: nothing to clear")
        return
    typer.echo(cache_folder())
    for line in _lines(found):
        typer.echo(line)
    if not yes:
        typer.confirm(f"Remove {decimal(_size(found))}?", abort=True)
    remove(found)
    typer.echo(f"freed {decimal(_size(found))}")
