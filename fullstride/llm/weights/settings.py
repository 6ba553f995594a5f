"""A JSON object's values, each checked to be what the engine computes with."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.errors import ConfigError

# What sizes, positions and token ids fit into.
LARGEST = 2**31 - 1


class Settings:
    """Values of one object in a file; every reader raises ConfigError, naming the file, the key and what is there."""

    def __init__(self, file: Path, raw: dict[str, Any], prefix: str = ""):
        """Read these values, whose keys are shown after `prefix`."""
        self.file, self.raw, self._prefix = file, raw, prefix

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number below 2^31; null and nothing are the default."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            raise self._refused(key, value, "a positive whole number below 2^31")
        return value

    def decimal(self, key: str, default: float | None = None) -> float:
        """A positive number; null and nothing are the default."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self._refused(key, value, "a positive number")
        return float(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids, as a list, as one number, or none."""
        value = self.raw.get(key)
        found = value if isinstance(value, list) else () if value is None else (value,)
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in found):
            raise self._refused(key, value, "token ids")
        return tuple(found)

    def inner(self, key: str) -> "Settings":
        """The object under a key; null and nothing are an empty one."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._refused(key, value, "an object")
        return Settings(self.file, value, f"{self._prefix}{key}.")

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def _refused(self, key: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(f"{self.file}: {self._prefix}{key}={shortened(value)}: expected {expected}")


def shortest(value: float) -> float:
    """The shortest number that float32, which a file holds, rounds to: 1e-5 and not 9.999999747e-6."""
    return float(str(np.float32(value)))


def shortened(value: Any) -> str:
    """A value as a text that fits a line."""
    text = str(value)
    return text if len(text) < 80 else f"{text[:77]}..."
