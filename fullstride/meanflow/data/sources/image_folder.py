"""`data=image_folder`: a folder of pictures, a zip of one or tar files of them, read while training."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fullstride.errors import ConfigError, Damaged, one_of
from fullstride.meanflow.config.schema import MEGAPIXELS, DataConfig
from fullstride.meanflow.data.dataset import Dataset, Split
from fullstride.meanflow.data.dataset import fingerprint as content
from fullstride.meanflow.data.reading import SkippedRecords, read_again
from fullstride.meanflow.data.sources.folders import fingerprint, hold_out
from fullstride.meanflow.data.sources.hugging_face import SavedRows, is_saved
from fullstride.meanflow.data.sources.image_files import (
    GREY_MODES,
    HOWS,
    ImageFiles,
    ImageForm,
    read_header,
)
from fullstride.meanflow.data.sources.interface import LABELS, SUFFIXES, Folder, Source
from fullstride.meanflow.data.sources.known_files import KnownFiles
from fullstride.meanflow.data.sources.webdataset import WebDatasetShards, are_shards
from fullstride.meanflow.data.sources.zips import Zip

# Pictures whose headers say whether the set is grey; a million headers would take minutes.
LOOKED_AT = 64


def image_folder(
    path: Path,
    *,
    image_size: int | None = None,
    how: str = "crop",
    holdout: float = 0.1,
    known: KnownFiles | None = None,
    leave_damaged: bool = False,
    max_megapixels: int = MEGAPIXELS,
) -> Dataset:
    """A set of pictures in files, 3 x h x w or 1 x h x w, decoded in the loader's workers.

    The folder holds `train/` and `test/` (or `val/`), each with a folder a class, at any depth below it, or with
    pictures alone, which then have no classes; or it holds those itself, of which a fixed share is held out. Other
    and hidden files are left aside, as are folders without pictures. Where EDM's `dataset.json` lies beside the
    pictures it says their classes, whatever folders they are in. All of it may be in a zip, or
    be a Hugging Face data set as `save_to_disk` writes it. In the place of pictures there may be webdataset's shards,
    whose samples say their classes themselves.

    The set is grey if up to 64 pictures taken evenly from it are; one with colours further on is refused when it is
    read, never robbed of them. Otherwise all become RGB, grey ones too. What is transparent is laid over white, of an
    animation the first frame is taken. A picture is turned as its EXIF orientation says, which is said once a process.

    Args:
        path: the folder, zip or shard.
        image_size: side of the square that pictures are brought to; None takes them as they are, all of one size.
        how: `crop` resizes the short side and takes the middle of the long one; `stretch` resizes both. Either halves
            with a box filter while that leaves enough, then takes the bicubic filter, as ADM's data did
            (arXiv:2105.05233).
        holdout: the share held out of every class where there is no `test/` or `val/`.
        known: the files that a run was begun with, whose held-out ones stay so; files that are new are trained on.
        leave_damaged: leave it to who reads the pictures to refuse damaged ones, as far as the set's form allows.
        max_megapixels: most million pixels of a picture; a larger one is refused, before it takes any memory.

    Returns:
        The data set; its fingerprint covers names and sizes of files, not their bytes.

    Raises:
        ConfigError: for settings out of range, a folder without pictures, one that can be read in two ways, or a zip
            that is damaged or encrypted; and, from the store, for a picture that is damaged, of another size, or
            deeper than 8 bits.

    """
    one_of("data.how", how, HOWS)
    if image_size is not None and image_size < 1:
        raise ConfigError(
            f"data.image_size={image_size}: expected a number of pixels, or null for pictures of one size"
        )
    source = source_of(path)
    half, other = source.halves()
    names = _pictures(source, half)
    labels, classes = _labelled(source, half, names)
    dealt: list[str] = []
    if other is None:
        held, dealt = _held_out(f"{half}/", names, labels, holdout, known)
        parts = [(half, np.array(names)[m].tolist(), labels[m]) for m in (~held, held)]
    else:
        tested = _pictures(source, other)
        parts = [(half, names, labels), (other, tested, _labelled(source, other, tested, classes)[0])]
    files = [f"{half}/{name}" for half, found, _ in parts for name in found]
    form = _form(source, files, image_size, how, leave_damaged=leave_damaged, megapixels=max_megapixels)
    train, test = (
        Split(ImageFiles(source, [f"{half}/{name}" for name in found], form), torch.from_numpy(y))
        for half, found, y in parts
    )
    shape = (1 if form.grey else 3, form.size[1], form.size[0])
    share = holdout if other is None else None
    # Of folders of classes the names tell the labels.
    listed = [] if isinstance(classes, list) else [content(*(y for _, _, y in parts))]
    sizes = source.sizes(
        files + [f"{half}/{LABELS}" for half in {half for half, _, _ in parts} if listed and source.labels_file]
    )
    identity = fingerprint(sizes, "image_folder", shape, form.how, share, *listed, *dealt)
    kept = None if other else frozenset(files[len(parts[0][1]) :])
    count = len(classes) if isinstance(classes, list) else classes
    files_now = KnownFiles(sizes, kept, listed=bool(listed))
    return Dataset("image_folder", train, test, count, shape, identity, files=files_now.packed())


def load(config: DataConfig, known: KnownFiles | None = None) -> Dataset:
    """The pictures of a configuration.

    Raises:
        ConfigError: as `image_folder`, or for a way to fit that is not of folders.

    """
    how = {"auto": "crop", "crop": "crop", "resize": "stretch"}.get(config.fit)
    if how is None:
        raise ConfigError(f"data.fit={config.fit}: expected crop or resize with data={config.name}")
    data = image_folder(
        config.place,
        image_size=config.image_size or None,
        how=how,
        holdout=config.holdout,
        known=known,
        leave_damaged=config.check or config.skip_damaged > 0,
        max_megapixels=config.max_megapixels,
    )
    skips = SkippedRecords(config.skip_damaged) if config.skip_damaged else None
    return replace(data, train=replace(data.train, skips=skips), test=replace(data.test, skips=skips))


def _held_out(
    prefix: str, names: list[str], labels: np.ndarray, share: float, known: KnownFiles | None
) -> tuple[np.ndarray, list[str]]:
    """Which pictures are held out, and what names them if they are others than a new run would hold out.

    Those that a run has held out stay so, and all others are trained on: dealt out anew, once a file is gone, nearly
    all of them would be some that were trained on.
    """
    anew = hold_out(names, labels, share)
    if known is None or known.held is None:
        return anew, []
    held = np.array([prefix + name in known.held for name in names])
    if not held.any() or held.all():
        raise ConfigError(
            f"{prefix}: {held.sum()} of {len(held)} pictures are held out by the run's list of files, expected some "
            "and not all; restore its files, or begin another run"
        )
    return held, [] if np.array_equal(held, anew) else [content(held)]


Classes = list[str] | int  # the folders of the classes, or how many of them dataset.json has


def source_of(path: Path) -> Source:
    """Return the source that the pictures at a path lie in.

    Raises:
        ConfigError: if it is nothing that pictures are read from, or damaged.
        ReadError: if it cannot be read for now.

    """
    if is_saved(path):
        return read_again(partial(SavedRows, path), path.__str__)
    if read_again(partial(are_shards, path), path.__str__):
        return WebDatasetShards(path)
    if not path.is_file():
        return Folder(path)
    if path.suffix.lower() == ".zip":
        return read_again(partial(Zip, path), path.__str__)
    raise ConfigError(f"{path}: a file, expected a folder of pictures, or a .zip or .tar of them; unpack it")


def _pictures(source: Source, half: str) -> list[str]:
    names, others = source.pictures(half)
    if not names:
        where = source.path / half
        raise ConfigError(f"{where}: no picture ({others} other files); expected files of {' '.join(SUFFIXES)}")
    return names


def _labelled(
    source: Source, half: str, names: list[str], trained: Classes | None = None
) -> tuple[np.ndarray, Classes]:
    """The class of each picture, and the classes; `trained` are those of the training half, if this is the other."""
    folder = source.path / half
    found = source.listed(half, names)
    if found is None:
        if isinstance(trained, int):
            raise ConfigError(f"{folder}: no {LABELS}, expected one as in train/")
        # The classes by their folders, none if the pictures lie in the split's own.
        classes = sorted({name.partition("/")[0] for name in names if "/" in name})
        loose = [name for name in names if "/" not in name]
        if classes and loose:
            raise ConfigError(
                f"{folder}: {len(loose)} pictures such as {loose[0]} next to class folders such as {classes[0]}/; "
                "move them into a class, or all into one folder"
            )
        return _labels(folder, names, classes if trained is None else trained), classes
    if isinstance(trained, list) or (trained is not None and (found[1] > trained or bool(found[1]) != bool(trained))):
        has = f"{trained} classes" if isinstance(trained, int) else "none"
        raise ConfigError(
            f"{folder}: its labels have {found[1]} classes, those of train/ {has}; expected the same classes"
        )
    return found


def _labels(folder: Path, names: list[str], classes: list[str]) -> np.ndarray:
    """The class of each picture as its place in `classes`; 0 where there are none."""
    places = {name: i for i, name in enumerate(classes)} or {"": 0}
    own = [name.rpartition("/")[0].partition("/")[0] for name in names]
    if unknown := sorted(set(own) - set(places)):
        known = f"the classes of train/ ({', '.join(classes[:3])}, ...)" if classes else "no classes, as in train/"
        found = f"class {unknown[0]}" if unknown[0] else "pictures without class"
        raise ConfigError(f"{folder}: {found}, expected {known}; move or rename one of the folders")
    return np.array([places[name] for name in own], dtype=np.int64)


def _form(
    root: Source, files: list[str], image_size: int | None, how: str, *, leave_damaged: bool, megapixels: int
) -> ImageForm:
    looked_at = files[:: -(-len(files) // LOOKED_AT)]
    headers = []
    for file in (root / name for name in looked_at):
        try:
            headers.append(read_again(partial(read_header, file, megapixels), file.__str__))
        except Damaged:
            if not leave_damaged:
                raise
    if not headers:
        raise ConfigError(
            f"{root.path}: none of {len(looked_at)} pictures can be read, such as {looked_at[0]}; copy them again"
        )
    grey = all(mode in GREY_MODES for mode, _ in headers)
    if image_size is None:
        return ImageForm(grey, headers[0][1], None, megapixels)
    return ImageForm(grey, (image_size, image_size), how, megapixels)
