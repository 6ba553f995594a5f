"""Objects by the path from which they are imported, `package.module:Name`."""

import importlib
import re
from typing import Any

from fullstride.errors import ConfigError, in_a_line, one_of


def is_import_path(name: str) -> bool:
    """Tell whether a name is an import path, and no name of a registry."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def load_object(path: str, key: str) -> Any:
    """The object at an import path.

    Args:
        path: `package.module:Name`.
        key: the setting that names it, for errors.

    Raises:
        ConfigError: if there is no such module, it cannot be imported, or it has no such attribute.

    """
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a stranger's module may raise anything
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        remedy = "install it, or name its folder in PYTHONPATH" if missing else f"repair {module}"
        raise ConfigError(
            f"{key}={path}: expected a module that can be imported ({in_a_line(error)}); {remedy}"
        ) from error
    if not hasattr(found, name):
        one_of(
            key, path, [f"{module}:{each}" for each in vars(found) if not each.startswith("_")] or [f"{module}:NAME"]
        )
    return getattr(found, name)
