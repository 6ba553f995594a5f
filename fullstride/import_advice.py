"""Imports within this package: one that lacks an optional package names its extra."""

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        try:
            super().exec_module(module)
        except ModuleNotFoundError as error:
            from fullstride.extras import advice

            error.msg = advice(error) or error.msg
            raise


class _Finder:
    """Finds the package's own modules as Python does, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith("fullstride.") else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Give advice on imports from here on; other hooks into imports, as those of type checkers, go first."""
    finders = sys.meta_path
    finders.insert(finders.index(PathFinder) if PathFinder in finders else 0, _Finder)
