"""From `key=value` overrides to settings, and back from what a run's folder has of them."""

from pathlib import Path
from typing import Any

from fullstride.bert.training.settings import TrainSettings, validate
from fullstride.errors import ConfigError
from fullstride.settings.fields import walk
from fullstride.settings.overrides import assign, flat, nearest, split, value_of

# What a group alone stands for.
SHORT = {"data": "data.name", "model": "model.size"}
# Values under other names: `meanflow` and PyTorch call a GPU cuda, JAX gpu.
SAME = {("device", "cuda"): "gpu"}
SHOWN = 5  # keys of another version that an error names


def settings_of(overrides: list[str], base: TrainSettings | None = None) -> TrainSettings:
    """The settings of a run, e.g. of `["model=mini", "data=gcide", "optimizer.lr=1e-3", "steps=5000"]`.

    Args:
        overrides: `key=value` in any order, each key at most once.
        base: what is kept of what is not given; changed in place. The defaults without one.

    Raises:
        ConfigError: as `apply`, or for a value that cannot be.

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
    known = {key.name: key for key in walk(settings)}
    for each in split(overrides, "steps=2000", SHORT):
        if each.key not in known:
            raise ConfigError(
                f"{each.given}: no such key{nearest(each.key, [*SHORT, *known], ('optimizer', 'evaluation'))}"
            )
        text = SAME.get((each.key, each.text), each.text)
        assign(settings, each.key, value_of(each._replace(text=text), known[each.key]))


def full_key(override: str) -> str:
    """The key that an override sets, of a group alone what that stands for."""
    name = override.partition("=")[0]
    return SHORT.get(name, name)


def settings_from(values: dict[str, Any], path: Path) -> TrainSettings:
    """The settings whose `dataclasses.asdict` is `values`, as the file at `path` in a run's folder has it.

    Raises:
        ConfigError: where they are those of another version; it names the file and `SHOWN` keys at most.

    """
    settings, found = TrainSettings(), dict(flat(values))
    if strange := sorted(found.keys() ^ {key.name for key in walk(settings)}):
        more = f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else ""
        raise ConfigError(
            f"{path} is not of this version's bert: {', '.join(strange[:SHOWN])}{more} are missing or unknown; train "
            "anew under another run_name, or go on with the version that began the run"
        )
    for key, value in found.items():
        assign(settings, key, value)
    return settings
