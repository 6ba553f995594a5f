"""From command-line overrides to a typed configuration, through Hydra's compose API.

Every override is checked on its own first, so that a mistake is named in our words: Hydra's own errors are traces.
"""

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
from fullstride.meanflow.config import TrainConfig
from fullstride.meanflow.presets import KEYS, PRESETS
from fullstride.meanflow.validate import validate

EXPECTED = {int: "int", float: "float", bool: "true or false", str: "text", list[int]: "a list of int such as [1,2]"}


def _store() -> None:
    """Tell Hydra the schema and the choices of each group."""
    store = ConfigStore.instance()
    store.store(name="schema", node=TrainConfig)
    for field in fields(TrainConfig):
        for name, values in PRESETS.get(field.name, {}).items():
            store.store(group=field.name, name=name, node=cast(Any, field.type)(**values))
    defaults = [{group: next(iter(choices))} for group, choices in PRESETS.items()]
    store.store(name="train", node={"defaults": ["schema", *defaults, "_self_"]})


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra without a file, a folder or a log; a caller's own Hydra is put back afterwards."""
    callers = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize(version_base="1.3", config_path=None, job_name="fullstride"):
            yield
    finally:
        GlobalHydra.instance().hydra = callers


def compose(overrides: list[str]) -> TrainConfig:
    """The configuration of a run, e.g. of `["model=unet_tiny", "loss.meanflow_ratio=0.75", "epochs=20"]`.

    Args:
        overrides: `group=choice` or `key=value`, in any order, each at most once.

    Raises:
        ConfigError: for an override without `=`, an unknown key or choice, a wrong type, a key given twice, or a value
            that `validate` refuses.

    """
    pairs = [_split(override) for override in overrides]
    for i, (key, text) in enumerate(pairs):
        if key in dict(pairs[:i]):
            raise ConfigError(f"{key}={text}: {key} is given twice; expected it once")
    checked = [_checked(key, text) for key, text in pairs]
    _store()
    with _hydra():
        config = cast(TrainConfig, OmegaConf.to_object(hydra.compose("train", checked)))
    validate(config)
    return config


def _split(override: str) -> tuple[str, str]:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"{override}: expected key=value, such as epochs=20")
    return key, text


def _checked(key: str, text: str) -> str:
    """The override as Hydra should read it, after checking its key and its type."""
    if key in PRESETS:
        one_of(key, text, PRESETS[key])
        return f"{key}={text}"
    if key not in KEYS:
        raise ConfigError(f"{key}={text}: no such key{_hint(key)}")
    # Text is taken as written: Hydra would read 1e-4 as a number and a,b as two values.
    literal = KEYS[key] is str and not text.startswith(("'", '"'))
    override = f"{key}={QuotedString(text, Quote.single).with_quotes() if literal else text}"
    if not _has_type(key, override):
        raise ConfigError(f"{key}={text}: expected {EXPECTED[KEYS[key]]}, got {text!r}")
    return override


def _has_type(key: str, override: str) -> bool:
    """Whether Hydra reads one value that the schema takes: no sweep, no reference, nothing missing."""
    try:
        parsed = OverridesParser.create().parse_override(override)
        value = parsed.value()
        OmegaConf.update(OmegaConf.structured(TrainConfig), key, value)
    except (HydraException, OmegaConfBaseException):
        return False
    # The schema would let lists in lists pass.
    flat = not isinstance(value, list) or all(type(x) is int for x in value)
    return flat and not parsed.is_sweep_override() and value != "???" and "${" not in override


def _hint(key: str) -> str:
    """The nearest keys by their whole or their last part, or else what there is."""
    group, _, leaf = key.rpartition(".")
    if leaf == "name" and group in PRESETS:
        return f"; did you mean {group}=..., one of {', '.join(PRESETS[group])}?"
    names = [*KEYS, *PRESETS]
    scores = {name: max(similarity(key, name), similarity(leaf, name.rpartition(".")[2])) for name in names}
    best = max(scores.values())
    if best >= ALIKE:
        return f"; did you mean {' or '.join([name for name in names if scores[name] == best][:2])}?"
    near = [name for name in names if group and name.startswith(f"{group}.")]
    return f"; expected one of {', '.join(near or [name for name in names if '.' not in name])}"
