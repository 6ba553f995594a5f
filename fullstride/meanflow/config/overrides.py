"""From command-line overrides to a typed configuration."""

import itertools
import re
from dataclasses import fields

from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config import datasets, networks, optimizers
from fullstride.meanflow.config.presets import KEYS, OUTSIDE, PRESETS, chosen, keys_of
from fullstride.meanflow.config.recipes import RECIPES, as_read
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.metrics import inception
from fullstride.meanflow.objective import times
from fullstride.meanflow.objective.loss import loss_of
from fullstride.meanflow.objective.weighting import weighting_of
from fullstride.settings.fields import Conflict, Key, check, refuse
from fullstride.settings.overrides import ELEMENTS, Override, assign, is_import_path, listed, nearest, split, value_of

CONFLICTS = (
    Conflict(
        "resume overwrite",
        lambda c: c.resume and c.overwrite,
        "one of them; resume continues the run, overwrite deletes it",
    ),
    Conflict(
        "init_form", lambda c: c.init_form != "auto" and not c.init_from, "init_from=PATH as well, or no init_form"
    ),
    Conflict(
        "ema.decays ema.widths",
        lambda c: not c.ema.decays and not c.ema.widths,
        "at least one average, such as ema.decays=[0.9999]",
    ),
    *networks.CONFLICTS,
    *datasets.CONFLICTS,
    *optimizers.CONFLICTS,
    *inception.CONFLICTS,
)


def validate(config: TrainConfig) -> None:
    """Check everything that depends neither on the machine nor on the data.

    Raises:
        ConfigError: for the first impossible value: its key, what was received, what is expected.

    """
    for group, choices in PRESETS.items():
        name = getattr(getattr(config, group), "name", "default")
        if not (group in OUTSIDE and is_import_path(name)):
            one_of(f"{group}.name", name, choices)
    check(config)
    chosen = (*weighting_of(config.loss.weighting).conflicts, *loss_of(config.loss).conflicts)
    refuse((*CONFLICTS, *chosen, *times.conflicts_of(config.loss)), config)


EXAMPLE = "epochs=20"


def compose(overrides: list[str]) -> TrainConfig:
    """The configuration of a run, e.g. of `["model=unet_tiny", "loss.meanflow_ratio=0.75", "epochs=20"]`.

    Args:
        overrides: `preset=recipe`, `group=choice` or `key=value`, in any order, each at most once. Given values win
            over the recipe; a chosen loss replaces all that the recipe says about it, a chosen model or data set keeps
            what it has too.

    Raises:
        ConfigError: as `read` and `validate`.

    """
    config = read(overrides)
    validate(config)
    return config


def read(overrides: list[str]) -> TrainConfig:
    """The configuration of `compose`, not yet validated (the trainer validates it first).

    Raises:
        ConfigError: for an override without `=`, an unknown key or choice, a wrong type, or a key given twice; where it
            lists several values, with how they are swept.

    """
    given = split(overrides, EXAMPLE)
    try:
        settings = _with_recipe(given)
        config = chosen(_choices(settings))
        known = keys_of(config) | {"preset": Key("preset", str, (), "")}
        for each in (each for each in settings if each.key not in PRESETS):
            if each.key not in known:
                raise ConfigError(f"{each.given}: no such key{_hint(each.key, config)}")
            assign(config, each.key, value_of(each, known[each.key]))
        return config
    except ConfigError as error:
        if not any(str(error).startswith(f"{each.given}: expected") and _sweeps(each) for each in given):
            raise
        raise ConfigError(f"{error}; several values need `meanflow train --multirun`") from None


def _choices(overrides: list[Override]) -> dict[str, str]:
    return {each.key: each.text for each in overrides if each.key in PRESETS}


def _with_recipe(given: list[Override]) -> list[Override]:
    """The recipe's settings, as far as nothing else is given, then the given ones."""
    texts = {each.key: each.text for each in given}
    if "preset" not in texts:
        return given
    one_of("preset", texts["preset"], RECIPES)
    recipe = {k: v for k, v in as_read(RECIPES[texts["preset"]].settings, texts).items() if k not in texts}
    if "loss" in texts:
        recipe = {k: v for k, v in recipe.items() if not k.startswith("loss.")}
    if "data" in texts:
        recipe.pop("data.num_classes", None)  # those of the recipe's own data
    added = [Override(f"{k}={v}", k, v) for k, v in recipe.items()]
    known = {*PRESETS, *keys_of(chosen(_choices([*added, *given])))}
    return [*(each for each in added if each.key in known), *given]


def _hint(key: str, config: TrainConfig) -> str:
    """Where the key belongs, or the nearest keys."""
    group, _, leaf = key.rpartition(".")
    if leaf == "name" and group in PRESETS:
        return f"; did you mean {group}=..., one of {', '.join(PRESETS[group])}?"
    if key in KEYS:
        return f" of {group}={getattr(config, group).name}; it is one of another {group}"
    groups = [group for group, choices in PRESETS.items() if "default" in choices]
    names = [*keys_of(config), *(field.name for field in fields(config))]
    return nearest(key, [name for name in dict.fromkeys(names) if name not in groups], groups)


def sweep(overrides: list[str]) -> list[list[str]]:
    """The runs of a sweep: every combination of the values that overrides list, as `seed=0,1` or `seed=range(3)`.

    Each run is named after its overrides: run_name, then its values of the sweep.

    Raises:
        ConfigError: if no override lists values, the name does, or two runs would be the same.

    """
    given = split(overrides, EXAMPLE)
    options = [[f"{each.key}={value}" for value in listed(each.text)] for each in given]
    if all(len(values) == 1 for values in options):
        raise ConfigError("--multirun: no override lists values; expected one such as seed=0,1,2 or model=unet,dit_b2")
    base = next((each.text for each in given if each.key == "run_name"), "")
    runs = []
    for combination in itertools.product(*options):
        share = [value for value, values in zip(combination, options, strict=True) if len(values) > 1]
        # A path cannot be part of a folder's name.
        name = "_".join([base or "sweep", *(re.sub(r"[/\\\0]|\.\.", "_", value) for value in share)])
        runs.append([*(text for text in combination if not text.startswith("run_name=")), f"run_name={name}"])
    if "," in base:
        raise ConfigError(f"run_name={base}: expected one name; each run's name is this one followed by its values")
    names = [run[-1] for run in runs]  # each needs a folder of its own
    if twice := sorted(name for name in set(names) if names.count(name) > 1):
        raise ConfigError(f"--multirun: {len(names)} runs, two of them {twice[0]}; expected each value once")
    return runs


def _sweeps(override: Override) -> bool:
    """Tell whether an override lists values of which a run takes one; a list may only lack its brackets."""
    if override.key == "run_name" or getattr(KEYS.get(override.key), "kind", None) in ELEMENTS:
        return False
    return len(listed(override.text)) > 1
