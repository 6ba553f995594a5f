"""Modules, and names in them, that the documentation gave before; they go with the next release."""

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from fullstride.errors import ConfigError

T = TypeVar("T", bound=type)

RENAMED = {
    "fullstride.ahead": "fullstride.device.triton_compile",
    "fullstride.bench": "fullstride.measure",  # without a word: what is imported of it has one
    "fullstride.bench.floor": "fullstride.measure.roofline",
    "fullstride.bench.flops": "fullstride.measure.flops",
    "fullstride.bench.gate": "fullstride.measure.gate",
    "fullstride.bench.pairs": "fullstride.measure.pairs",
    "fullstride.bench.timing": "fullstride.measure.timing",
    "fullstride.bert.batch": "fullstride.bert.data.batch",
    "fullstride.bert.config": "fullstride.bert.model.config",
    "fullstride.bert.loss": "fullstride.bert.training.loss",
    "fullstride.bert.weights": "fullstride.bert.model.weights",
    "fullstride.meanflow.models.recompute": "fullstride.meanflow.models.common",
    "fullstride.meanflow.recorded": "fullstride.meanflow.sampling.graphed",
    "fullstride.meanflow.samplers": "fullstride.meanflow.sampling.samplers",
    "fullstride.meanflow.times": "fullstride.meanflow.objective.times",
}
# Names in a module: old, new.
NAMES = {
    "fullstride.measure.roofline": {"Floor": "RooflineBound", "floor": "roofline_bound"},
    "fullstride.measure.timing": {"Plan": "TimingPlan"},
    "fullstride.step.torch": {
        "ALONE": "SINGLE", "Late": "LateMetrics", "Sent": "HostCopy", "joined": "join_processes",
    },
}  # fmt: skip
# Keywords of the PyTorch step: old, new.
TRAIN_STEP = {"gate": "check_first_step", "awaken": "randomize_zeros", "say": "log"}


def add_old_names(module: ModuleType) -> None:
    """Give a module the names that some of its contents had."""
    names = NAMES[module.__name__]

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in names:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        warnings.warn(f"{module.__name__}.{name} is now {names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(module, names[name])

    module.__dict__["__getattr__"] = __getattr__


class _Finder:
    """Finds the old names, imports the new ones and says so."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, _Loader()) if name in RENAMED else None


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, RENAMED[module.__name__]
        if old != "fullstride.bench":
            warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)  # which the import system hands out in this one's place


def install() -> None:
    """Find the old names from here on."""
    sys.meta_path.insert(0, _Finder)


def own_names(
    given: Mapping[str, Any], aliases: Mapping[str, str], *, different: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Settings by this library's names.

    Args:
        given: values by name.
        aliases: other names, and what each is called here.
        different: names that are refused, and why.

    Raises:
        ConfigError: if a setting is given by both of its names, or by a name that means something else here.

    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if different and name in different:
            raise ConfigError(f"{name}={value!r} is not accepted: {different[name]}")
        own = aliases.get(name, name)
        if own in found or (own != name and own in given):
            raise ConfigError(f"{own} and {name} are the same setting: give one of them")
        found[own] = value
    return found


def accepts(
    aliases: Mapping[str, str], *, different: Mapping[str, str] | None = None, deprecated: bool = False
) -> Callable[[T], T]:
    """Make a class take other names of its arguments, by keyword; with a warning if they are `deprecated`."""

    def with_aliases(cls: T) -> T:
        init = cls.__init__

        @wraps(init)
        def __init__(self: Any, *args: Any, **given: Any) -> None:  # noqa: N807
            if deprecated and (old := sorted(aliases.keys() & given.keys())):
                said = ", ".join(f"{name} is now {aliases[name]}" for name in old)
                warnings.warn(f"{cls.__name__}: {said}", DeprecationWarning, stacklevel=2)
            init(self, *args, **own_names(given, aliases, different=different))

        cls.__init__ = __init__  # pyright: ignore[reportAttributeAccessIssue]
        for old, new in aliases.items() if deprecated and hasattr(cls, "__dataclass_fields__") else ():
            setattr(cls, old, _old_attribute(cls.__name__, old, new))
        return cls

    return with_aliases


def _old_attribute(owner: str, old: str, new: str) -> property:
    """A field by the name that it had."""

    def read(self: Any) -> Any:
        warnings.warn(f"{owner}: {old} is now {new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(read)
