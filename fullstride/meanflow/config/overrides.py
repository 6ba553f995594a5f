"""From command-line overrides to a typed configuration, through Hydra's compose API.

Every override is checked on its own first, so that a mistake is named in our words: Hydra's own errors are traces.
"""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fullstride.errors import ALIKE, ConfigError, one_of, similarity
from fullstride.meanflow.config.presets import KEYS, PRESETS, chosen, keys_of
from fullstride.meanflow.config.ranges import validate
from fullstride.meanflow.config.recipes import RECIPES, as_read
from fullstride.meanflow.config.schema import ModelConfig, TrainConfig

EXPECTED = {
    int: "int",
    float: "float",
    bool: "true or false",
    str: "text",
    list[int]: "a list of int such as [1,2]",
    list[float]: "a list of float such as [0.999,0.9999]",
    list[str]: "a list of names such as [a,b]",
}
ELEMENTS: dict[Any, tuple[type, ...]] = {list[int]: (int,), list[float]: (int, float), list[str]: (str,)}

Pair = tuple[str, str]


def _store() -> None:
    """Tell Hydra the schema and the choices of each group."""
    store = ConfigStore.instance()
    # The plain base, so that any family of networks may take its place.
    store.store(name="schema", node=TrainConfig(model=ModelConfig()))
    for group, choices in PRESETS.items():
        for name, make in choices.items():
            store.store(group=group, name=name, node=make())
    defaults = [{group: next(iter(choices))} for group, choices in PRESETS.items()]
    store.store(name="train", node={"defaults": ["schema", *defaults, "_self_"]})


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra without a file, a folder or a log; a caller's own Hydra is put back afterwards."""
    callers = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        # With a module of ours Hydra does not search the stack for its caller, which takes longer than to compose.
        with hydra.initialize_config_module("fullstride.meanflow.config", version_base="1.3", job_name="fullstride"):
            yield
    finally:
        GlobalHydra.instance().hydra = callers


def compose(overrides: list[str]) -> TrainConfig:
    """The configuration of a run, e.g. of `["model=unet_tiny", "loss.meanflow_ratio=0.75", "epochs=20"]`.

    Args:
        overrides: `preset=recipe`, `group=choice` or `key=value`, in any order, each at most once. What is given wins
            over the recipe; a chosen loss replaces all that the recipe says about it, a chosen model or data set keeps
            what it has too.

    Raises:
        ConfigError: for an override without `=`, an unknown key or choice, a wrong type, a key given twice, or a value
            that `validate` refuses; where it lists several, with how they are swept.

    """
    try:
        return _composed(overrides)
    except ConfigError as error:
        if not any(str(error).startswith(f"{override}: expected") for override in overrides if _sweeps(override)):
            raise
        raise ConfigError(f"{error}; several values need `meanflow train --multirun`") from None


def _composed(overrides: list[str]) -> TrainConfig:
    pairs = [_split(override) for override in overrides]
    for i, (key, text) in enumerate(pairs):
        if key in dict(pairs[:i]):
            raise ConfigError(f"{key}={text}: {key} is given twice; expected it once")
    pairs = _with_recipe(pairs)
    base = chosen({key: text for key, text in pairs if key in PRESETS and text in PRESETS[key]})
    schema = OmegaConf.structured(base)  # once: to make it takes longer than all checks
    checked = [_checked(key, text, base, schema) for key, text in pairs]
    _store()
    with _hydra():
        config = cast(TrainConfig, OmegaConf.to_object(hydra.compose("train", checked)))
    validate(config)
    return config


def sweep(overrides: list[str]) -> list[list[str]]:
    """The runs of a sweep: every combination of the values that overrides list, as `seed=0,1` or `seed=range(3)`.

    Each run is named after what it was given: run_name, then its share of the sweep.

    Raises:
        ConfigError: if no override lists values, the name does, or two runs would be the same.

    """
    options = [_values(override) for override in overrides]
    swept = [values for values in options if len(values) > 1]
    if not swept:
        raise ConfigError("--multirun: no override lists values; expected one such as seed=0,1,2 or model=unet,dit_b2")
    given = dict(_split(override) for override in overrides)
    runs = []
    for combination in itertools.product(*options):
        share = [value for value, values in zip(combination, options, strict=True) if len(values) > 1]
        name = "_".join([given.get("run_name", "sweep"), *map(_as_name, share)])
        runs.append([*(text for text in combination if not text.startswith("run_name=")), f"run_name={name}"])
    _check_names([run[-1] for run in runs], given.get("run_name", ""))
    return runs


def _as_name(text: str) -> str:
    """A value as part of a folder's name, in which a path cannot be."""
    return re.sub(r"[/\\\0]|\.\.", "_", text)


def _check_names(names: list[str], given: str) -> None:
    """Each run needs a folder of its own."""
    if "," in given:
        raise ConfigError(f"run_name={given}: expected one name, which starts each run's; its values follow it")
    if twice := sorted(name for name in set(names) if names.count(name) > 1):
        raise ConfigError(f"--multirun: {len(names)} runs, two of them {twice[0]}; expected each value once")


def _values(override: str) -> list[str]:
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return [override]  # compose says what is wrong with it
    if not parsed.is_sweep_override():
        return [override]
    try:
        return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
    except HydraException:
        raise ConfigError(f"--multirun: {override}: expected values one by one, as seed=0,1,2 or range(3)") from None


def _sweeps(override: str) -> bool:
    """Whether an override lists values of which a run takes one; a list may only lack its brackets."""
    key = override.partition("=")[0]
    if key == "run_name" or KEYS.get(key) in ELEMENTS:
        return False
    try:
        return OverridesParser.create().parse_override(override).is_sweep_override()
    except HydraException:
        return False


def _split(override: str) -> Pair:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"{override}: expected key=value, such as epochs=20")
    return key, text


def _with_recipe(pairs: list[Pair]) -> list[Pair]:
    """The recipe's settings, as far as nothing else is given, then the given ones."""
    given = dict(pairs)
    if "preset" not in given:
        return pairs
    one_of("preset", given["preset"], RECIPES)
    recipe = {k: v for k, v in as_read(RECIPES[given["preset"]].settings, given).items() if k not in given}
    if "loss" in given:
        recipe = {k: v for k, v in recipe.items() if not k.startswith("loss.")}
    if "data" in given:
        recipe.pop("data.num_classes", None)  # those of the recipe's own data
    known = keys_of(chosen({k: v for k, v in (recipe | given).items() if k in PRESETS and v in PRESETS[k]}))
    return [*((k, v) for k, v in recipe.items() if k in PRESETS or k in known), *pairs]


def _checked(key: str, text: str, base: TrainConfig, schema: Any) -> str:
    """The override as Hydra should read it, after checking its key and its type; the schema takes its value."""
    if key in PRESETS:
        one_of(key, text, PRESETS[key])
        return f"{key}={text}"
    keys = keys_of(base) | {"preset": str}
    if key not in keys:
        raise ConfigError(f"{key}={text}: no such key{_hint(key, base)}")
    # Text is taken as written: Hydra would read 1e-4 as a number and a,b as two values.
    literal = keys[key] is str and not text.startswith(("'", '"'))
    override = f"{key}={QuotedString(text, Quote.single).with_quotes() if literal else text}"
    if not _has_type(key, override, keys[key], schema):
        raise ConfigError(f"{key}={text}: expected {EXPECTED[keys[key]]}, got {text!r}")
    return override


def _has_type(key: str, override: str, kind: Any, schema: Any) -> bool:
    """Whether Hydra reads one value that the schema takes: no sweep, no reference, nothing missing."""
    try:
        parsed = OverridesParser.create().parse_override(override)
        value = parsed.value()
        OmegaConf.update(schema, key, value)
    except (HydraException, OmegaConfBaseException):
        return False
    # The schema would let lists in lists pass.
    flat = not isinstance(value, list) or all(type(x) in ELEMENTS.get(kind, ()) for x in value)
    return flat and not parsed.is_sweep_override() and value != "???" and "${" not in override


def _hint(key: str, base: TrainConfig) -> str:
    """Where the key belongs, or the nearest keys by their whole or their last part, or else what there is."""
    group, _, leaf = key.rpartition(".")
    if leaf == "name" and group in PRESETS:
        return f"; did you mean {group}=..., one of {', '.join(PRESETS[group])}?"
    if key in KEYS:
        return f" of {group}={getattr(base, group).name}; it is one of another {group}"
    names = list(dict.fromkeys([*keys_of(base), *(field.name for field in fields(base))]))
    # A group without a choice is meant by its keys alone.
    meant = [name for name in names if "default" not in PRESETS.get(name, ())]
    scores = {name: max(similarity(key, name), similarity(leaf, name.rpartition(".")[2])) for name in meant}
    if group:  # the one given is right until nothing in it is alike
        own = {name: score for name, score in scores.items() if name.startswith(f"{group}.") and score >= ALIKE}
        scores = own or scores
    best = max(scores.values())
    if best >= ALIKE:
        return f"; did you mean {' or '.join([name for name in scores if scores[name] == best][:2])}?"
    near = [name for name in names if group and name.startswith(f"{group}.")]
    return f"; expected one of {', '.join(near or [name for name in names if '.' not in name])}"
