"""Networks and objectives of other packages, as `model=package.module:Class` and `loss=package.module:Class`.

What their classes add to the common settings are keys of the configuration, by name: `model.width=64`.
"""

import copy
import functools
import inspect
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from inspect import Parameter
from typing import Annotated, Any

from fullstride.errors import ConfigError
from fullstride.meanflow.config.networks import ModelConfig
from fullstride.meanflow.config.schema import LossConfig
from fullstride.settings.overrides import EXPECTED, load_object

NETWORK = "a class of torch.nn.Module, made as Network(channels, image_size, num_classes=0, ...)"
OBJECTIVE = "a dataclass that inherits from MeanFlowLoss of fullstride.meanflow.objective.loss"
FROM_DATA = ("num_classes", "augment_dim", "condition_shape")  # arguments of a network that are no keys

Field = tuple[str, Any, Any]


@functools.cache
def network_config(path: str) -> type[ModelConfig]:
    """The configuration of a network: its keys are the keywords of the constructor that have a default.

    Raises:
        ConfigError: if there is no such class, or it cannot be made as a network is.

    """
    from torch import nn

    made = load_object(path, "model")
    if not (inspect.isclass(made) and issubclass(made, nn.Module)):
        raise ConfigError(f"model={path}: {_named(made)} found, expected {NETWORK}")
    signature = inspect.signature(made)
    try:
        signature.bind(3, 32, num_classes=0)
    except TypeError as error:
        raise ConfigError(
            f"model={path}: cannot be called as {made.__name__}{signature} ({error}), expected {NETWORK}"
        ) from None
    own = list(signature.parameters.values())[2:]
    settable = [each for each in own if each.name not in FROM_DATA and each.default is not Parameter.empty]
    found = _fields(_hints(made.__init__), {each.name: each.default for each in settable})
    given = {"augmented": "augment_dim", "conditioned": "condition_shape"}
    takes = {fact: name in signature.parameters for fact, name in given.items()}
    return _config(ModelConfig, path, found, {"network": path, "any_shape": True} | takes)


@functools.cache
def loss_config(path: str) -> type[LossConfig]:
    """The configuration of an objective: its keys are the fields that it adds to `MeanFlowLoss`.

    Raises:
        ConfigError: if there is no such class, or it is no objective.

    """
    from fullstride.meanflow.objective.loss import MeanFlowLoss

    made = load_object(path, "loss")
    if not (inspect.isclass(made) and issubclass(made, MeanFlowLoss) and is_dataclass(made)):
        raise ConfigError(f"loss={path}: {_named(made)} found, expected {OBJECTIVE}")
    common = {each.name for each in fields(MeanFlowLoss)}
    own = [each for each in fields(made) if each.init and each.name not in common]
    values = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in own}
    if missing := [name for name, value in values.items() if value is MISSING]:
        raise ConfigError(
            f"loss={path}: {', '.join(missing)} without a default, expected one for each field that it adds"
        )
    return _config(LossConfig, path, list(_fields(_hints(made), values)), {})


def saved_loss(values: dict[str, Any]) -> LossConfig:
    """The configuration of an objective as a checkpoint has it; its package need not be there to sample."""
    common = {each.name for each in fields(LossConfig)}
    own = [(name, type(value), value) for name, value in values.items() if name not in common]
    return _config(LossConfig, values["name"], own, {})(**values)


def _config(base: type, path: str, own: Iterable[Field], namespace: dict[str, Any]) -> Any:
    given = [(name, kind, field(default_factory=functools.partial(copy.copy, value))) for name, kind, value in own]
    taken = {each.name for each in fields(base)} & {name for name, *_ in given}
    if taken:
        raise ConfigError(f"{path}: {', '.join(taken)} are keys of every {base.__name__}; expected other names")
    return make_dataclass("Outside" + base.__name__, [("name", str, path), *given], bases=(base,), namespace=namespace)


def _fields(hints: dict[str, Any], values: dict[str, Any]) -> Iterator[Field]:
    """Those of a type that the command line can write; others keep their default."""
    for name, value in values.items():
        kind = hints.get(name, type(value))
        if (typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind) in EXPECTED:
            yield name, kind, list(value) if isinstance(value, tuple) else value  # as JSON gives it back


def _hints(made: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(made, include_extras=True)
    except NameError:  # of names that only a type checker imports
        return {}


def _named(found: Any) -> str:
    return f"the class {found.__name__}" if inspect.isclass(found) else f"of type {type(found).__name__}"
