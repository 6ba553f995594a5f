"""The interval between checkpoints: `10` epochs, `500steps`, `10min`."""

import re
from typing import NamedTuple


class SaveInterval(NamedTuple):
    """Time between checkpoints; one of the three is above 0, or none if only the end is saved."""

    epochs: int = 0
    steps: int = 0
    minutes: float = 0.0


EXPECTED = "epochs such as 10, steps such as 500steps, minutes such as 10min, or 0 for the end alone"
_FORM = re.compile(r"(\d+)()|(\d+) ?(steps?)|(\d+(?:\.\d+)?) ?(min)")


def is_interval(value: int | str) -> bool:
    """Tell whether a value is one of these forms; `0steps` and `0min` are not."""
    found = _FORM.fullmatch(str(value))
    # A number of epochs may be 0.
    return found is not None and (found[1] is not None or float(found[3] or found[5]) > 0)


def save_interval(value: int | str) -> SaveInterval:
    """The interval of a value for which `is_interval` holds."""
    found = _FORM.fullmatch(str(value))
    assert found is not None
    epochs, _, steps, _, minutes, _ = found.groups()
    return SaveInterval(int(epochs or 0), int(steps or 0), float(minutes or 0))
