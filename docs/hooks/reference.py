"""Hook of mkdocs: reference pages generated from the code, and equations as MathML."""

import html
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import latex2mathml.converter
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click
from typer.main import get_command

sys.path.insert(0, str(Path(__file__).parents[2]))  # this clone's code, whichever is installed

from fullstride.bert.training.settings import TrainSettings
from fullstride.cli.app import app
from fullstride.cli.meanflow_settings import settings as meanflow_settings
from fullstride.cli.settings import Setting, settings_in
from fullstride.llm.vllm_names import SAMPLING_BEFORE
from fullstride.renamed import NAMES, RENAMED, TRAIN_STEP

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
WORDS = """# Old and new names

Old names work for one release and raise a `DeprecationWarning` that gives the new one.

## Commands

| old | new |
|---|---|
| `fullstride bench CASE` | `python -m benchmarks CASE` |
| `fullstride experiment NAME` | `python -m benchmarks NAME` |
| `phase2` to `phase6` | `overfit`, `sanity`, `ablations`, `objectives`, `weightings` |
| `fullstride report` | `python -m benchmarks report` |
| `fullstride launch --backend NAME -- COMMAND` | `fullstride launch NAME -- COMMAND` |

## Modules

| old | new |
|---|---|
{modules}

## Names in modules

| module | old | new |
|---|---|---|
{names}

## Keywords

| class | old | new |
|---|---|---|
{keywords}
"""
SETTINGS = """# Settings

Every key that `fullstride meanflow train` and `fullstride bert train` accept as `key=value`, with its default.
`fullstride meanflow keys` and `fullstride bert keys` print the same lists.

## MeanFlow

{meanflow}

## BERT

{bert}
"""


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages of commands, of settings and of old names."""
    made = {"command-line": command_line(), "settings": settings(), "words": words()}
    for name, text in made.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))


def on_page_content(text: str, **_: object) -> str:
    """Typeset equations: MathML needs neither a script nor a font, and every current browser shows it."""
    return EQUATION.sub(_typeset, text)


def command_line() -> str:
    """Return the Markdown of every command and its options, as in `--help`."""
    command = get_command(app)
    return get_docs_for_click(obj=command, ctx=typer.Context(command), name="fullstride", title="Command line")


def settings() -> str:
    """Return the Markdown of every setting of the two training commands."""
    return SETTINGS.format(meanflow=_table(meanflow_settings()), bert=_table(settings_in(TrainSettings())))


def words() -> str:
    """Return the Markdown of every renamed public name."""
    modules = [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    names = [f"| `{module}` | `{old}` | `{new}` |" for module, own in NAMES.items() for old, new in own.items()]
    classes = {"SamplingParams": SAMPLING_BEFORE, "fullstride.step.torch.TrainStep": TRAIN_STEP}
    keywords = [f"| `{name}` | `{old}` | `{new}` |" for name, own in classes.items() for old, new in own.items()]
    return WORDS.format(modules="\n".join(modules), names="\n".join(names), keywords="\n".join(keywords))


def _table(settings: Iterable[Setting]) -> str:
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in setting)}</tr>" for setting in settings)
    return f"<table><thead><tr><th>key<th>default<th>meaning</tr></thead><tbody>{rows}</tbody></table>"


def _typeset(found: re.Match[str]) -> str:
    kind, equation = found.groups()
    if kind == "span":
        return latex2mathml.converter.convert(html.unescape(equation), display="inline")
    return f'<div class="equation">{latex2mathml.converter.convert(html.unescape(equation), display="block")}</div>'
