"""The weights that a run starts from: a run of this library, or a file of another project, all of it or nothing."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import (
    MANIFEST,
    Tensors,
    checkpoints,
    ema_group,
    find_checkpoint,
    read_group,
    read_manifest,
)
from fullstride.meanflow.checkpoints.paces import averages_of
from fullstride.meanflow.checkpoints.weight_files import is_diffusers, read_weights
from fullstride.meanflow.config.networks import ModelConfig
from fullstride.meanflow.config.presets import config_from_dict
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.config.starts import AUTO, FORMS, OWN, forms_of
from fullstride.meanflow.models.x_prediction import PREFIX, XPrediction
from fullstride.runs.atomic_files import note
from fullstride.runs.folder import folder_of, run_config
from fullstride.settings.overrides import load_object

# Of a network's settings those that change neither its weights nor what they compute where r is t; what the output
# stands for may change, and is said.
FREE_MODEL_KEYS = {"name", "class_conditional", "recompute", "dropout", "decoupled_blocks", "prediction"}


@dataclass(frozen=True)
class StartWeights:
    """Weights as they were stored.

    Attributes:
        origin: where they are from, for messages.
        tensors: tensors by their stored names.
        model: settings of their network as far as they are known, by the keys of `model`.
        settings: what a foreign file says about its training.

    """

    origin: str
    tensors: Tensors
    model: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_start(path: Path) -> StartWeights:
    """Read weights: the first average of a run or checkpoint, one file of a checkpoint, or another project's file.

    Raises:
        ConfigError: if nothing there can be read as weights.

    """
    if not path.exists():
        raise ConfigError(f"init_from={path}: no such file or folder; give a run, a checkpoint or a file of weights")
    if path.is_file() and (path.parent / MANIFEST).is_file():
        return _own(path.parent, path.stem)
    if path.is_dir() and not is_diffusers(path):
        checkpoint = find_checkpoint(path)
        return _own(checkpoint, ema_group(averages_of(config_from_dict(read_manifest(checkpoint)["config"]).ema)[0]))
    read = read_weights(path)
    return StartWeights(str(path), read.tensors, settings=read.settings)


def _own(checkpoint: Path, group: str) -> StartWeights:
    model = read_manifest(checkpoint)["config"]["model"]
    return StartWeights(f"{checkpoint}, {group}", read_group(checkpoint, group), model)


def starting_weights(config: TrainConfig) -> StartWeights | None:
    """The weights that a run starts from; None if none are named, or it continues from a checkpoint of its own.

    Raises:
        ConfigError: as `read_start`.

    """
    if not config.init_from:
        return None
    run = folder_of(config)
    continues = config.resume and bool(run_config(run)) and bool(checkpoints(run))
    return None if continues else read_start(Path(config.init_from).expanduser())


def start_from(network: nn.Module, weights: StartWeights, config: ModelConfig, form: str = AUTO) -> list[str]:
    """Give a network other weights, all of them, but for the table of classes where it has another number of them.

    A table of classes starts as the network made it; the row of 'no class', the last, is the weights' own.

    Args:
        network: the network as it was made.
        weights: from `read_start`.
        config: the configuration of the network.
        form: a name in `FORMS`, `fullstride` for names as here, or `auto`.

    Returns:
        What was not taken as it is, in words.

    Raises:
        ConfigError: if the form is not known, or naming every weight and setting that does not fit; the network is then
            unchanged.

    """
    network = network.network if isinstance(network, XPrediction) else network
    found = _without_prefix(_converted(network, weights, form))
    own, told = dict(network.state_dict()), []
    if (before := weights.model.get("prediction", "velocity")) != config.prediction:
        told.append(f"the weights predict {before}, which model.prediction={config.prediction} has to unlearn")
    for name in [name for name in own.keys() | found.keys() if f".{name}".endswith(".label.weight")]:
        if name not in own:
            del found[name]
            told.append(f"{name} is left out, as the network takes no classes")
        elif name not in found or len(found[name]) != len(own[name]):
            told.append(f"{name} starts anew for {len(own[name]) - 1} classes")
            if name in found and found[name].shape[1:] == own[name].shape[1:]:
                own[name][-1] = found[name][-1]
            found[name] = own[name]
    _check_fit(own, found, _other_settings(weights.model, asdict(config)), weights.origin)
    network.load_state_dict(found)
    return told


def _without_prefix(tensors: Tensors) -> Tensors:
    """The tensors by the names that they have in a network of a velocity."""
    if not all(name.startswith(PREFIX) for name in tensors):
        return tensors
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _converted(network: nn.Module, weights: StartWeights, form: str) -> Tensors:
    chosen = _form(weights) if form == AUTO else form
    if chosen == OWN:
        return dict(weights.tensors)
    if other := [key for key, value in FORMS[chosen].settings.items() if weights.settings.get(key, value) != value]:
        trained = " ".join(f"{key}={weights.settings[key]}" for key in other)
        expected = " ".join(f"{key}={FORMS[chosen].settings[key]}" for key in other)
        raise ConfigError(f"init_from={weights.origin}: trained with {trained}, expected {expected}; use other weights")
    try:
        return load_object(FORMS[chosen].convert, "init_form")(weights.tensors, network)
    except ConfigError as error:
        raise ConfigError(f"init_from={weights.origin}: {error}") from None


def _form(weights: StartWeights) -> str:
    found = [] if weights.model else forms_of(weights.tensors)
    if told := [form for form in found if FORMS[form].settings.keys() & weights.settings.keys()]:
        return told[0]
    if len(found) > 1:
        raise ConfigError(
            f"init_from={weights.origin}: {' and '.join(found)} have these names and other times; set "
            f"{' or '.join(f'init_form={form}' for form in found)}"
        )
    return found[0] if found else OWN


def _other_settings(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    keys = [key for key in sorted(saved.keys() & wanted.keys() - FREE_MODEL_KEYS) if saved[key] != wanted[key]]
    return [f"model.{key}={saved[key]} there and {wanted[key]} here" for key in keys]


def _check_fit(own: Tensors, found: Tensors, settings: Iterable[str], origin: str) -> None:
    """Raise unless weights have the network's names and shapes, and finite numbers."""
    both = own.keys() & found.keys()
    other = [n for n in own if n in both and found[n].shape != own[n].shape]
    sizes = [f"{n} {tuple(found[n].shape)} for {tuple(own[n].shape)}" for n in other]
    wrong = [n for n in both if found[n].is_floating_point() and not found[n].isfinite().all()]
    faults = {
        "other settings": list(settings),
        "missing": _listed(own.keys() - both),
        "unknown": _listed(found.keys() - both),
        "of another shape": _listed(sizes),
        "not finite": _listed(wrong),
    }
    if told := "; ".join(f"{what}: {', '.join(names)}" for what, names in faults.items() if names):
        raise ConfigError(
            f"init_from={origin}: its weights do not fit model, {told}; expected the same network, of which only the "
            "number of classes may differ"
        )


def _listed(names: Iterable[str]) -> list[str]:
    """Names, those that differ by the number of a block as one with their count."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return [name if count == 1 else f"{name} ({count})" for name, count in sorted(counts.items())]


def begin(network: nn.Module, config: TrainConfig, *, tell: bool = True) -> None:
    """Give a new run's network the weights of `init_from`, if there are any; the averages are made after it.

    Raises:
        ConfigError: as `starting_weights` and `start_from`.

    """
    if (weights := starting_weights(config)) is None:
        return
    told = start_from(network, weights, config.model, config.init_form)
    if tell:
        note("; ".join([f"init_from: starting from {weights.origin}", *told]))
