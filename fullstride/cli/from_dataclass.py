"""Commands whose options are the fields of a dataclass, so that each stands once: name, type, default and help."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer


def command_from(call: Callable[..., Any], options: type, *, unique: bool = False) -> Callable[..., None]:
    """Make the function of a Typer command of a dataclass.

    The annotation of a field that is an option is `Annotated[type, help]`, `Annotated[type, help, metavar]`,
    `Annotated[type, help, settings]`, a dictionary of what `typer.Option` takes, by `names` also its names, or
    `Annotated[type, typer.Option(...)]`; a field without one is no option. A field of type `tuple[T, ...]` may be
    given several times.

    Args:
        call: takes the dataclass's instance, then its own parameters, which are parameters of the command, too.
        options: the dataclass, whose docstring is the command's help.
        unique: keep each value of an option that is given several times once.

    """
    fields = list(_parameters(options))
    own = list(inspect.signature(call, eval_str=True).parameters.values())[1:]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in [*fields, *own]]
    several = {name for name, hint in get_type_hints(options).items() if _item(hint)}

    def command(**given: Any) -> None:
        chosen = {each.name: given.pop(each.name) for each in fields}
        for name in several & chosen.keys():
            chosen[name] = tuple(dict.fromkeys(chosen[name]) if unique else chosen[name])
        call(options(**chosen), **given)

    command.__doc__ = options.__doc__
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    return command


def sections_of(options: type) -> dict[str, str]:
    """Group the options for a help page: under the `heading` of each class, the fields that it adds to its bases."""
    rest = [parameter.name for parameter in _parameters(options)]
    sections = {}
    for owner in filter(dataclasses.is_dataclass, reversed(options.__mro__)):
        if own := [name for name in rest if name in vars(owner)["__dataclass_fields__"]]:
            sections[owner.__dict__["heading"]] = " ".join(own)
            rest = [name for name in rest if name not in own]
    return sections


def _item(type_: Any) -> Any:
    """Return T of `tuple[T, ...]`; None for any other type."""
    return get_args(type_)[0] if get_origin(type_) is tuple and get_args(type_)[1:] == (...,) else None


def _parameters(options: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        if get_origin(hints[field.name]) is not Annotated:
            continue
        plain, option, *more = get_args(hints[field.name])
        if isinstance(option, str):
            settings: dict[str, Any] = {"metavar": more[0]} if more and isinstance(more[0], str) else dict(*more)
            option = typer.Option(*settings.pop("names", ()), help=option, **settings)
        default: Any = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        if item := _item(plain):
            plain, default = list[item], list(default)
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[plain, option]
        )
