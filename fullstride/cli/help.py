"""Help pages: options and commands in sections, as plain text that wraps between names at any width.

Typer's own pages cut names in narrow terminals: its tables by folding them, click's lists by wrapping at hyphens.
"""

import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

WIDEST = 100  # longer lines are hard to read
NAMES = 30  # most columns of names next to their explanations; half of that in narrow terminals
Rows = list[tuple[str, str]]


class _Wrapper(textwrap.TextWrapper):
    """Text wrapper that breaks at spaces and after the `|` between choices, nowhere else."""

    wordsep_simple_re = re.compile(r"([ \t\n]+)|(?<=\|)(?=\S)")


def wrapped(text: str, width: int, indent: str = "", hanging: str = "") -> list[str]:
    """Wrap a text, whose own line breaks count as spaces."""
    wrapper = _Wrapper(width, initial_indent=indent, subsequent_indent=indent + hanging)
    wrapper.break_on_hyphens = wrapper.break_long_words = False
    return wrapper.wrap(text)


def listed(heading: str, rows: Rows, width: int) -> Iterator[str]:
    """Format lines of a section: names on the left, their meaning on the right."""
    most = NAMES if width > 70 else NAMES // 2
    column = max((len(name) for name, _ in rows if len(name) <= most), default=most)
    yield from ("", f"{heading}:")
    for name, text in rows:
        lines = wrapped(text, width - column - 4)
        if len(name) > column:
            yield from wrapped(name, width, "  ", "    ")
        elif lines:
            yield f"  {name:{column}}  {lines.pop(0)}"
        else:
            yield f"  {name}"
        yield from (" " * (column + 4) + line for line in lines)


def _written(text: str, width: int) -> Iterator[str]:
    """Lines of an epilog: paragraphs, or a heading and lines that each have a name, two spaces and a text."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        heading, *rows = paragraph.split("\n")
        pairs = [row.partition("  ") for row in rows]
        if pairs and all(gap for _, gap, _ in pairs):
            yield from listed(heading, [(name, text) for name, _, text in pairs], width)
        else:
            yield from ("", *wrapped(paragraph, width))


class _Page:
    """Help page of a command or of a group of them.

    Attributes:
        sections: names of options and commands, separated by spaces, under their headings, in the order in which they
            are shown; what is in none comes last.

    """

    sections: ClassVar[Mapping[str, str]] = {}

    def collect_usage_pieces(self: Any, ctx: Any) -> list[str]:
        """Return the words that follow the command's own name."""
        arguments = [_name(each, each.required) for each in self.get_params(ctx) if _is_argument(each)]
        return ["[OPTIONS]", *arguments, *(["COMMAND [ARGS]..."] if hasattr(self, "commands") else [])]

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        """Write the whole page."""
        width = min(shutil.get_terminal_size().columns - 1, WIDEST)
        usage = " ".join(["Usage:", ctx.command_path, *self.collect_usage_pieces(ctx)])
        lines = wrapped(usage, width, hanging="           ")
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            lines += ["", *wrapped(paragraph, width, "  ")]
        for heading, rows in self._sections(ctx):
            lines += listed(heading, rows, width)
        lines += _written(self.epilog, width) if self.epilog else []
        formatter.write("\n".join(lines) + "\n")

    def _sections(self: Any, ctx: Any) -> Iterator[tuple[str, Rows]]:
        params = self.get_params(ctx)
        if arguments := [(_name(each), each.get_help_record(ctx)[1]) for each in params if _is_argument(each)]:
            yield "Arguments", arguments
        found = {name: self.commands[name] for name in self.list_commands(ctx)} if hasattr(self, "commands") else {}
        about = {name: inspect.cleandoc(each.help or "").split("\n\n")[0] for name, each in found.items()}
        commands = {name: (name, about[name]) for name, each in found.items() if not each.hidden}
        options = {each.name: each.get_help_record(ctx) for each in params if not (_is_argument(each) or each.hidden)}
        for heading, names in self.sections.items():
            # A command and an option may share a name.
            yield heading, [commands.pop(name, None) or options.pop(name) for name in names.split()]
        for heading, rows in (("Commands", commands), ("Options", options)):
            if rows:
                yield heading, list(rows.values())


def _is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def _name(argument: Any, required: bool = True) -> str:
    name = argument.metavar or argument.name.upper()
    return (name if required else f"[{name}]") + ("..." if argument.nargs != 1 else "")


class HelpCommand(_Page, TyperCommand):
    """Command with such a page."""


class HelpGroup(_Page, TyperGroup):
    """Group of commands with such a page."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands in the order of the sections."""
        found = list(super().list_commands(ctx))
        ordered = [name for names in self.sections.values() for name in names.split() if name in found]
        return ordered + [name for name in found if name not in ordered]


def _with(sections: Mapping[str, str] | None, cls: type) -> type:
    return type(cls.__name__, (cls,), {"sections": sections}) if sections else cls


class App(typer.Typer):
    """Typer app with these help pages."""

    def __init__(
        self, about: str, sections: Mapping[str, str] | None = None, cls: type[HelpGroup] = HelpGroup, **settings: Any
    ):
        """Make a group of commands, which shows its help if it is called without any."""
        common: Any = {"no_args_is_help": True, "rich_markup_mode": None, "pretty_exceptions_enable": False}
        super().__init__(help=about, cls=_with(sections, cls), **common, **settings)

    def command(
        self,
        name: str | None = None,
        *,
        sections: Mapping[str, str] | None = None,
        cls: type[TyperCommand] | None = None,
        **settings: Any,
    ) -> Callable[[Any], Any]:
        """Register a command."""
        return super().command(name, cls=_with(sections, cls or HelpCommand), **settings)
