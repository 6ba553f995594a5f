"""Tables of `fullstride meanflow keys` and `presets`, and shell completions of `fullstride meanflow train`."""

import typer

from fullstride.cli.settings import Setting, offers, plain_table, print_table, settings_in
from fullstride.errors import one_of
from fullstride.meanflow.config.presets import KEYS, PRESETS, WITH_KEYS_OF_THEIR_OWN, chosen
from fullstride.meanflow.config.recipes import RECIPES

NARROW = 70  # columns below which a table of presets has no room for their sources
CHOICES = {group: list(choices) for group, choices in PRESETS.items() if "default" not in choices}


def settings() -> list[Setting]:
    """Return every key, its default, its meaning; a key of several choices has the default of the first one."""
    found: dict[str, Setting] = {}
    for made in WITH_KEYS_OF_THEIR_OWN:
        for setting in settings_in(chosen(made)):
            found.setdefault(setting.key, setting)
    groups = [Setting(group, names[0], " | ".join(names)) for group, names in CHOICES.items()]
    return [found.pop("preset"), *groups, *(found[key] for key in KEYS)]


def choices() -> dict[str, list[str]]:
    """Return the values to offer for each key: the choices of a group, its names, else the default."""
    made = [chosen(each) for each in reversed(WITH_KEYS_OF_THEIR_OWN)]
    found = {key: values for config in made for key, values in offers(config).items()}
    return {key: found[key] for key in KEYS} | CHOICES | {"preset": list(RECIPES)}


def show_presets() -> None:
    """Print a table of the published recipes."""
    from rich.console import Console

    console = Console()
    with_source = not console.is_terminal or console.width >= NARROW
    table = plain_table("preset", "data", "model", "epochs", *(["source"] if with_source else []))
    table.columns[3].justify = "right"
    for name, recipe in RECIPES.items():
        cells = [name, *(recipe.settings[key] for key in ("data", "model", "epochs"))]
        table.add_row(*cells, *([recipe.source.partition(";")[0]] if with_source else []))
    print_table(table)
    typer.echo("\nThe settings of one: fullstride meanflow presets NAME", err=True)


def preset_lines(name: str) -> list[str]:
    """Return lines about one recipe: its source and its settings, one a line.

    Raises:
        ConfigError: for an unknown name.

    """
    one_of("preset", name, RECIPES)
    recipe = RECIPES[name]
    return [f"preset={name}", f"source: {recipe.source}", *(f"  {k}={v}" for k, v in recipe.settings.items())]
