"""The data sets by name: facts about each that need no reading, and the settings that it takes."""

from dataclasses import dataclass
from typing import Any

from fullstride.settings.fields import Conflict
from fullstride.settings.overrides import is_import_path


@dataclass(frozen=True)
class DatasetRow:
    """A data set.

    Attributes:
        load: import path of the function that makes its `Dataset`: of a path or None, or, of a folder, of the
            `DataConfig` and the files that a run was begun with.
        records: number of records in the training half; 0 if only reading tells.
        image_shape: (channels, height, width) of its records, or of another rank.
        num_classes: number of classes; 0 if there are no labels.
        folder: whether the data set is the folder at `data.path`.
        made: whether it comes with a package and takes no `data.path`.
        pixels: whether its records are pictures.
        latents: whether its records are latents of pictures.
        one_by_one: whether its records are files, some of which may be damaged or change.
        resizable: whether `data.image_size` changes the size of its records.

    """

    load: str
    records: int = 0
    image_shape: tuple[int, ...] = (0, 0, 0)
    num_classes: int = 0
    folder: bool = False
    made: bool = False
    pixels: bool = True
    latents: bool = False
    one_by_one: bool = False
    resizable: bool = True


_DATA = "fullstride.meanflow.data"
DATASETS: dict[str, DatasetRow] = {
    "digits": DatasetRow(f"{_DATA}.digits:load", 898, (1, 8, 8), 10, made=True, resizable=False),
    "mnist5k": DatasetRow(f"{_DATA}.mnist5k:load", 4_000, (1, 28, 28), 10),
    "fashion_mnist": DatasetRow(f"{_DATA}.fashion_mnist:load", 60_000, (1, 28, 28), 10),
    "cifar10": DatasetRow(f"{_DATA}.cifar10:load", 50_000, (3, 32, 32), 10),
    "image_folder": DatasetRow(f"{_DATA}.sources.image_folder:load", folder=True, one_by_one=True),
    # As many as ImageNet's, at 256x256.
    "latents": DatasetRow(
        f"{_DATA}.latents:load", 1_281_167, (4, 32, 32), 1000, folder=True, pixels=False, latents=True, resizable=False
    ),
    "tensors": DatasetRow(f"{_DATA}.tensors:load", folder=True, pixels=False, resizable=False),
    "deterministic": DatasetRow(f"{_DATA}.overfit:deterministic", 1280, (1, 8, 8), 10, made=True),
    "multiclass": DatasetRow(f"{_DATA}.overfit:multiclass", 1280, (1, 8, 8), 4, made=True),
}


def row_of(name: str) -> DatasetRow:
    """The row of a data set; of one by its import path, a row that knows nothing."""
    return DatasetRow(name) if is_import_path(name) else DATASETS[name]


def scale_of(config: Any) -> float:
    """Factor between the stored records of a `DataConfig` and the network's inputs: that of latents, 1 of others."""
    return config.latent_scale if row_of(config.name).latents else 1.0


def noun_of(name: str, *, pixels: bool) -> str:
    """Name of a data set's samples, for people."""
    return "images" if pixels else "latents" if row_of(name).latents else "samples"


def _row(config: Any) -> DatasetRow:
    return row_of(config.data.name)


def _changed(config: Any, key: str) -> bool:
    return getattr(config.data, key) != getattr(type(config.data), key)


def _those(flag: str, *, value: bool = True) -> str:
    return " or ".join(name for name, row in DATASETS.items() if getattr(row, flag) == value)


_FOLDERS, _FILES, _LATENTS = _those("folder"), _those("one_by_one"), _those("latents")
_UNDRAWN = _those("pixels", value=False)
CONFLICTS = (
    Conflict("data", lambda c: _row(c).folder and not c.data.path, "data.path=FOLDER with data={c.data.name}"),
    Conflict(
        "data.path",
        lambda c: _row(c).made and c.data.path != "",
        "no data.path with data={c.data.name}, which comes with scikit-learn",
    ),
    Conflict(
        "data.allow_changed data",
        lambda c: c.data.allow_changed and not _row(c).one_by_one,
        f"data={_FILES}; other data must be the same as when the run began",
    ),
    Conflict(
        "data.skip_damaged data",
        lambda c: c.data.skip_damaged > 0 and not _row(c).one_by_one,
        f"data={_FILES}, which reads pictures one by one",
    ),
    Conflict(
        "data.max_megapixels data",
        lambda c: _changed(c, "max_megapixels") and not _row(c).one_by_one,
        f"data={_FILES}, which reads pictures one by one",
    ),
    Conflict("data.check", lambda c: c.data.check and not _row(c).folder, f"data={_FOLDERS}"),
    Conflict(
        "data.augment data",
        lambda c: not _row(c).pixels and c.data.augment > 0,
        "pictures; latents can only be mirrored (data.hflip)",
    ),
    Conflict(
        "data.hflip data",
        lambda c: c.data.hflip and not _row(c).pixels and not _row(c).latents,
        "pictures or latents; leave it out",
    ),
    Conflict(
        "data.image_size data",
        lambda c: not _row(c).pixels and c.data.image_size > 0,
        "data.image_size=0: {c.data.name} stay as stored",
    ),
    Conflict(
        "evaluation.features data",
        lambda c: not _row(c).pixels and len(c.evaluation.features) > 0,
        "none with data={c.data.name}: they are defined on pictures; the energy distance is always there",
    ),
    Conflict(
        "data.num_classes data",
        lambda c: c.data.num_classes > 0 and _row(c).pixels,
        f"none with data={{c.data.name}}, which knows its classes; leave it out, it is for data={_UNDRAWN}",
    ),
    Conflict(
        "data.latent_scale",
        lambda c: _changed(c, "latent_scale") and not _row(c).latents,
        f"none with data={{c.data.name}}; leave it out, it is for data={_LATENTS}",
    ),
    Conflict(
        "data.holdout",
        lambda c: _changed(c, "holdout") and not _row(c).folder,
        f"none with data={{c.data.name}}, which has a held-out half; leave it out, it is for data={_FOLDERS}",
    ),
    Conflict(
        "data.fit",
        lambda c: _changed(c, "fit") and c.data.image_size == 0,
        "data.image_size=PIXELS as well; or leave data.fit out, and the stored size stays",
    ),
)
