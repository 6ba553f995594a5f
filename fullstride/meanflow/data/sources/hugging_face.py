"""Pictures of a Hugging Face data set that `save_to_disk` wrote, read where they lie in its Arrow files."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.errors import MOST_SHOWN, ConfigError, one_line, shortened
from fullstride.extras import how_to_install
from fullstride.meanflow.data.sources.interface import Archive

EXTRA = "hugging-face"
# As the library names the halves, where this package has another name.
OURS = {"validation": "val"}
LABEL_COLUMNS = ("label", "labels")


def is_saved(path: Path) -> bool:
    """Tell whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote a folder."""
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("state.json", "dataset_info.json")
    )


class SavedRows(Archive):
    """Rows with one column of pictures; their names are their numbers.

    The classes are in the column `label` or `labels`, or in the only one of `ClassLabel`; without one there are none.
    """

    labels_file = False

    def __init__(self, path: Path):
        """Look at the columns and sizes.

        Raises:
            ConfigError: if the package is missing, the set is damaged, or it is not clear where the pictures and
                labels are.

        """
        super().__init__(path)
        self._columns: dict[str, Any] = {}
        self._labels: dict[str, tuple[np.ndarray, int]] = {}
        self._sizes = {}
        for half, rows in _loaded(path).items():
            self._labels[half] = _labels(path / half, rows)
            pictures = self._columns[half] = _pictures(path / half, rows)
            from pyarrow import compute  # pyright: ignore[reportMissingImports]

            lengths: Any = compute.binary_length  # pyright: ignore[reportAttributeAccessIssue]
            sizes = enumerate(lengths(pictures).to_pylist())
            self._sizes |= {f"{half}/{i:09d}".removeprefix("./"): size for i, size in sizes}

    def folders(self) -> list[str]:
        """Implement `Source`."""
        return [half for half in self._labels if half != "."]

    def pictures(self, half: str) -> tuple[list[str], int]:
        """Implement `Source`."""
        return [f"{i:09d}" for i in range(len(self._columns[half]))], 0

    def listed(self, half: str, names: list[str]) -> tuple[np.ndarray, int]:
        """Implement `Source`."""
        return self._labels[half]

    def open(self, name: str) -> io.BytesIO:
        """Implement `Archive`."""
        half, _, row = name.rpartition("/")
        if half not in self._columns:
            self._columns[half] = _pictures(self.path / half, _loaded(self.path)[half])
        return io.BytesIO(self._columns[half][int(row)].as_py())

    def __getstate__(self) -> dict[str, Any]:
        """Without the rows, which each process maps into memory for itself."""
        return super().__getstate__() | {"_columns": {}, "_labels": {}}


def _loaded(path: Path) -> dict[str, Any]:
    """The data sets by half, `.` for one without."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            f"{path}: a Hugging Face data set, which needs the package datasets; {how_to_install(EXTRA)}"
        ) from None
    try:
        found = datasets.load_from_disk(str(path))
    # What a damaged one leads the library's readers into is not said anywhere.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = shortened(one_line(error), MOST_SHOWN)
        raise ConfigError(f"{path}: not a whole Hugging Face data set ({reason}); copy or save it again") from None
    return (
        {OURS.get(str(name), str(name)): rows for name, rows in found.items()}
        if isinstance(found, Mapping)
        else {".": found}
    )


def _columns(rows: Any, kind: str) -> list[str]:
    return [name for name, feature in rows.features.items() if type(feature).__name__ == kind]


def _pictures(where: Path, rows: Any) -> Any:
    """The column of the pictures' bytes, in chunks that stay on disk until one is read."""
    if len(found := _columns(rows, "Image")) != 1:
        raise ConfigError(
            f"{where}: {len(found)} columns of pictures among {', '.join(rows.column_names)}; expected one; keep it "
            "with select_columns, or cast it to datasets.Image, and save the set again"
        )
    import pyarrow.compute as pc  # pyright: ignore[reportMissingImports]

    field: Any = pc.struct_field  # pyright: ignore[reportAttributeAccessIssue]
    pictures = field(rows.with_format("arrow")[:].column(found[0]), "bytes")
    if pictures.null_count:
        raise ConfigError(
            f"{where}: {pictures.null_count} of {len(rows)} rows have no picture in them; expected one in each; save "
            "the set again by save_to_disk, which puts the files' bytes into it"
        )
    return pictures


def _labels(where: Path, rows: Any) -> tuple[np.ndarray, int]:
    """The class of each row and the number of classes."""
    named = [name for name in LABEL_COLUMNS if name in rows.features]
    found = named or _columns(rows, "ClassLabel")
    if len(found) > 1:
        raise ConfigError(f"{where}: labels in {' and '.join(found)}, expected one of them; rename it to label")
    if not found:
        return np.zeros(len(rows), dtype=np.int64), 0
    values = rows.with_format("arrow")[:].column(found[0]).to_pylist()
    if wrong := [value for value in values if type(value) is not int or value < 0]:
        raise ConfigError(f"{where}: {wrong[0]!r} in column {found[0]}, expected a class from 0 on in each row")
    return np.array(values, dtype=np.int64), getattr(rows.features[found[0]], "num_classes", None) or max(values) + 1
