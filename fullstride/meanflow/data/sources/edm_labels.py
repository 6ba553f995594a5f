"""Labels in EDM's form: pictures in folders that only bound their size, 00000/img00000123.png, and a dataset.json.

That is what EDM's and StyleGAN's dataset_tool write (github.com/NVlabs/edm, dataset_tool.py): {"labels": [["00000/
img00000000.png", 3], ...]}, or null for a set without classes.
"""

import json
import re
from collections.abc import Sequence

import numpy as np

from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import note

LABELS = "dataset.json"
CHUNKED = re.compile(r"\d{5}/img\d{8}\.\w+")


def listed_labels(place: str, content: bytes | None, names: Sequence[str]) -> tuple[np.ndarray, int] | None:
    """The class of each picture and the number of classes by a dataset.json; None where there is none.

    Args:
        place: of the pictures, for messages.
        content: of the file.
        names: of the pictures, relative to it.

    Returns:
        Labels, int64, and one more than the largest of the file; 0 and 0 where it says that there are no classes.

    Raises:
        ConfigError: for a file that is not of that form or does not name every picture, or for pictures of that form
            without it.

    """
    if content is None:
        if all(CHUNKED.fullmatch(name) for name in names):
            raise ConfigError(
                f"{place}: pictures such as {names[0]}, as EDM's dataset_tool writes them, but no {LABELS}, without "
                f'which their folders would be taken for classes; copy it, too, or write {{"labels": null}} there '
                "for no classes"
            )
        return None
    classes = _parsed(f"{place}/{LABELS}", content)
    if classes is None:
        return np.zeros(len(names), dtype=np.int64), 0
    if missing := [name for name in names if name not in classes]:
        raise ConfigError(
            f"{place}/{LABELS}: no label for {len(missing)} of {len(names)} pictures, such as {missing[0]}; expected "
            "one for each; add them, or remove the pictures"
        )
    if absent := len(classes) - len(names):
        note(f"{place}/{LABELS}: names {absent} pictures that are not there")
    return np.array([classes[name] for name in names], dtype=np.int64), max(classes.values()) + 1


def _parsed(file: str, content: bytes) -> dict[str, int] | None:
    form = 'EDM\'s {"labels": [["00000/img00000000.png", 3], ...]}, or null in the place of the list'
    try:
        pairs = json.loads(content)["labels"]
        if pairs is None:
            return None
        found = {str(name).replace("\\", "/"): label for name, label in pairs}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file}: expected {form}; mend it, or rename it if it is something else") from None
    wrong = [name for name, label in found.items() if type(label) is not int or label < 0]
    if wrong or not found:
        what = f"{found[wrong[0]]!r} as the label of {wrong[0]}" if wrong else "no label"
        raise ConfigError(f"{file}: {what}, expected a class from 0 on for each picture, as in {form}")
    if len(found) < len(pairs):
        raise ConfigError(f"{file}: names a picture twice, expected one label for each")
    return found
