"""Modules by the names that the documentation gave them before; they go with the next release."""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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
