"""The files of a set of samples: written next to an earlier set, which they replace once complete."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from fullstride.device.select import cores
from fullstride.meanflow.checkpoints.folder import save_tensors
from fullstride.meanflow.data.dataset import to_uint8
from fullstride.runs.atomic_files import note
from fullstride.runs.lock import locked

SAMPLES = "samples"  # folder in a run's
MADE, GRID, CLASSES = "samples.json", "grid.png", "classes.png"
LATENTS, TENSORS = "latents.safetensors", "samples.safetensors"
WRITING = ".writing_samples_"
AT_ONCE = 256  # pictures that are turned into bytes together
SHOWN, ROWS = 256, 10  # pictures of the grid; classes of the other one, and pictures of each


def check_place(out: Path) -> None:
    """Check that a set can be written in a folder, or the folder be made, before there is a set; nothing is left.

    Raises:
        OSError: if it cannot.

    """
    # A link to nothing is there, too: no folder can be made of its name.
    there = next(path for path in (out, *out.parents) if os.path.lexists(path))
    with tempfile.TemporaryDirectory(prefix=WRITING, dir=there):
        pass


def default_place(checkpoint: Path, made: Mapping[str, Any], decay: float | str) -> Path:
    """The folder of a set in the run of its checkpoint, named after what the images depend on.

    Args:
        checkpoint: the folder of a checkpoint; one that lies outside a run gets the samples next to it.
        made: the settings of the samples.
        decay: decay of the default average, or its name; that of any other is in the folder's name.

    """
    parts = [checkpoint.absolute().name, made["sampler"]]
    parts += [] if made["steps"] is None else [made["steps"]]
    parts += ["seed", made["seed"], "num", made["num"]]
    defaults = {"label": None, "ema": decay, "precision": "fp32", "guidance": 1.0}
    for key, default in defaults.items():
        parts += [] if made.get(key, default) == default else [key, made[key]]
    parts += ["no", "class"] if made.get("no_class") else []
    parts += ["omega", made["omega"], made["omega_start"], made["omega_end"]] if "omega" in made else []
    parts += ["decoded"] if "vae" in made else []
    up = "../.." if checkpoint.absolute().parent.name == "checkpoints" else ".."
    return Path(os.path.normpath(checkpoint / up)) / SAMPLES / "-".join(map(str, parts))


def replace_set(out: Path, made: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Write a set in a folder of its own, then put it in the place of the earlier one.

    Whatever keeps it from being written, such as a full disk, the earlier one is as it was. A note says if the earlier
    one was made with other settings.

    Args:
        out: the folder of samples; what in it no earlier call has written stays.
        made: the settings of the samples, and their number as `num`.
        write: function that writes the files into a given folder.

    Raises:
        OSError: if they cannot be written.

    """
    out.mkdir(parents=True, exist_ok=True)
    with _beside(out) as part:
        write(part)
        (part / MADE).write_text(json.dumps(made, indent=1) + "\n")
        names = {path.name for path in part.iterdir()}
        earlier = {}  # what an earlier set was made with, if there is one of this program's
        with suppress(FileNotFoundError, ValueError):
            earlier = found if isinstance(found := json.loads((out / MADE).read_text()), dict) else {}
        keys = [key for key in {**earlier, **made} if earlier and earlier.get(key) != made.get(key)]
        if changed := ", ".join(f"{key}: {earlier.get(key)} -> {made.get(key)}" for key in keys):
            note(f"{out}: replacing samples made with other settings ({changed})")
        for name in (name for name in _earlier(earlier) if name not in names):
            (out / name).unlink(missing_ok=True)
        # First the number of files, so that a later call finds all of them, whatever happens here in between.
        (part / MADE).replace(out / MADE)
        _move(part, out)


def add_to_set(out: Path, write: Callable[[Path], None]) -> None:
    """Write more of a set that is there, all of it or nothing.

    Raises:
        OSError: if it cannot be written.

    """
    with _beside(out) as part:
        write(part)
        _move(part, out)


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A new folder on the same disk; those that a killed process left go."""
    for left in out.glob(f"{WRITING}*"):
        with suppress(FileNotFoundError), locked(left) as alone:
            if alone:
                shutil.rmtree(left, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=WRITING, dir=out))
    try:
        with locked(part):
            yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _move(part: Path, out: Path) -> None:
    for path in sorted(part.iterdir()):
        path.replace(out / path.name)


def _earlier(made: dict[str, Any]) -> list[str]:
    """List files that an earlier call may have written and that a smaller set would leave behind."""
    try:
        count = int(made["num"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return []
    return [*(f"{index:06d}.png" for index in range(count)), CLASSES, GRID, LATENTS, TENSORS]


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write latents or samples, and what belongs to them, to one file."""
    save_tensors(tensors, file)
    file.chmod(0o644)  # safetensors lets nobody else read


def write_pictures(folder: Path, images: Iterable[Tensor], classes: Int[Tensor, " n"] | None) -> None:
    """A PNG each, a grid of up to 256, and for several classes a grid with a row for each of the first ten.

    Files are packed by all cores, those of a part while the next one is made.

    Args:
        folder: folder of the files.
        images: (k, c, h, w) in [-1, 1], part after part.
        classes: the class of every image, or None.

    """
    from fullstride.meanflow.sampling.grids import save_grid  # loads matplotlib, which a trainer does without

    rows = _rows(classes)
    wanted, shown, index = {i for row in rows.values() for i in row}, dict[int, Tensor](), 0
    pool = ThreadPoolExecutor(cores())
    written: Iterable[None] = ()
    try:
        for some in (some for part in images for some in part.split(AT_ONCE)):
            ready, here = to_uint8(some).permute(0, 2, 3, 1).numpy(), range(index, index + len(some))
            list(written)  # which raises what could not be written
            written = pool.map(_save, ready, (folder / f"{i:06d}.png" for i in here))
            shown |= {i: picture for i, picture in zip(here, some, strict=True) if i < SHOWN or i in wanted}
            index += len(some)
        list(written)
    finally:
        pool.shutdown(cancel_futures=True)
    if rows:
        first = torch.stack([shown[i] for row in rows.values() for i in row])
        columns = len(next(iter(rows.values())))
        save_grid(first, folder / CLASSES, columns=columns, row_captions=[str(c) for c in rows])
    first = torch.stack([shown[i] for i in range(min(index, SHOWN))])
    save_grid(first, folder / GRID, columns=max(1, round(len(first) ** 0.5)))


def _save(picture: UInt8[np.ndarray, "h w c"], path: Path) -> None:
    Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).save(path)


def _rows(classes: Tensor | None) -> dict[int, list[int]]:
    """The first pictures of each of the first classes, as many of each."""
    if classes is None:
        return {}
    rows = {c: (classes == c).nonzero()[:ROWS, 0].tolist() for c in classes.unique().tolist()[:ROWS]}
    columns = min(map(len, rows.values()))
    return {c: row[:columns] for c, row in rows.items()}
