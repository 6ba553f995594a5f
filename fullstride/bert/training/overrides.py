"""From `key=value` overrides to settings, and back from what a run's folder has of them."""

import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from fullstride.bert.training.settings import TrainSettings, validate
from fullstride.errors import ALIKE, ConfigError, similarity
from fullstride.runs.resume import flat

# What a group alone stands for.
SHORT = {"data": "data.name", "model": "model.size"}
EXPECTED = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
BOOLEANS = {"true": True, "false": False}
# Values under other names: `meanflow` and PyTorch call a GPU cuda, JAX gpu.
SAME = {("device", "cuda"): "gpu"}
SHOWN = 5  # keys of another version that an error names


def keys(kind: type = TrainSettings, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Every key with its type."""
    hints = typing.get_type_hints(kind)
    for f in fields(kind):
        if is_dataclass(hints[f.name]):
            yield from keys(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, hints[f.name]


def settings_of(overrides: list[str], base: TrainSettings | None = None) -> TrainSettings:
    """The settings of a run, e.g. of `["model=mini", "data=gcide", "optimizer.lr=1e-3", "steps=5000"]`.

    Args:
        overrides: `key=value` in any order, each key at most once.
        base: what is kept of what is not given; changed in place. The defaults without one.

    Raises:
        ConfigError: for an override without `=`, an unknown key, a key given twice, or a value that cannot be.

    """
    settings = base or TrainSettings()
    apply(overrides, settings)
    validate(settings)
    return settings


def apply(overrides: list[str], settings: TrainSettings) -> None:
    """Set what the overrides name; the whole is not checked yet.

    Raises:
        ConfigError: for an override without `=`, an unknown key, a key given twice, or a value of another type.

    """
    known, given = dict(keys()), set()
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"{override}: expected key=value, such as steps=2000")
        if (key := full_key(override)) not in known:
            raise ConfigError(f"{override}: no such key{_hint(name, known)}")
        if key in given:
            raise ConfigError(f"{override}: {key} is given twice; expected it once")
        given.add(key)
        _set(settings, key, _value(override, SAME.get((key, text), text), known[key]))


def full_key(override: str) -> str:
    """The key that an override sets, of a group alone what that stands for."""
    name = override.partition("=")[0]
    return SHORT.get(name, name)


def settings_from(values: dict[str, Any], path: Path) -> TrainSettings:
    """The settings whose `dataclasses.asdict` is `values`, as the file at `path` in a run's folder has it.

    Raises:
        ConfigError: where they are those of another version; it names the file and `SHOWN` keys at most.

    """
    settings, known = TrainSettings(), {key for key, _ in keys()}
    found = dict(flat(values))
    if strange := sorted(found.keys() ^ known):
        more = f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else ""
        raise ConfigError(
            f"{path} is not of this version's bert: {', '.join(strange[:SHOWN])}{more} are missing or unknown; train "
            "anew under another run_name, or go on with the version that began the run"
        )
    for key, value in found.items():
        _set(settings, key, value)
    return settings


def _set(settings: Any, key: str, value: Any) -> None:
    *groups, name = key.split(".")
    for group in groups:
        settings = getattr(settings, group)
    setattr(settings, name, value)


def _value(override: str, text: str, kind: type) -> Any:
    try:
        return BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{override}: expected {EXPECTED[kind]}, got {text!r}") from None


def _hint(name: str, known: dict[str, type]) -> str:
    """The nearest keys and groups, by their whole or their last part, or all keys there are."""
    leaf, named = name.rpartition(".")[2], known if "." in name else [*SHORT, *known]
    alike = {key: max(similarity(key, name), similarity(key.rpartition(".")[2], leaf)) for key in named}
    near = sorted((key for key in named if alike[key] >= ALIKE), key=lambda key: -alike[key])[:3]
    return f"; did you mean {' or '.join(near)}?" if near else f"; expected one of {', '.join(known)}"
