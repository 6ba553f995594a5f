"""Picture files as records: decoded one at a time by PIL, all of one size and with the same channels."""

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageFile, ImageOps
from torch import Tensor

from fullstride.errors import ConfigError, Damaged, one_line
from fullstride.meanflow.config.schema import MEGAPIXELS, MOST_MEGAPIXELS
from fullstride.meanflow.data.sources.interface import LARGEST, Member, Source
from fullstride.runs.atomic_files import note

GREY_MODES = ("1", "L", "LA")
# 16-bit and floating pixels: which of their values is white is not known.
DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
# As in RGB;16B: what PIL reduces to 8 bits without a word. A bitmap's BGR;16 is of 16 bits a pixel.
DEEP_RAW = re.compile(r";16[BLN]")
WHITE = 255
# EXIF orientations (JEITA CP-3451): 1 is upright, 5 to 8 swap width and height.
UPRIGHT, TURNED, ON_ITS_SIDE = 1, range(2, 9), range(5, 9)
HOWS = ("crop", "stretch")


@dataclass(frozen=True)
class ImageForm:
    """Format to which every picture of a set is decoded.

    Attributes:
        grey: one channel, else red, green and blue.
        size: (width, height).
        how: how a picture of another size gets there, `crop` or `stretch`; None if it must not be of another.
        megapixels: most million pixels of a picture that is decoded, which takes up to 16 bytes for each of them.

    """

    grey: bool
    size: tuple[int, int]
    how: str | None
    megapixels: int = MEGAPIXELS


@contextmanager
def _opened(file: Path | Member, megapixels: int) -> Iterator[ImageFile.ImageFile]:
    """PIL's picture; what PIL finds wrong with the file is an error in one line, as is a size beyond the limits."""
    try:
        with warnings.catch_warnings(), file.open("rb") as opened:
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # of what is refused below, or allowed
            if (size := opened.seek(0, os.SEEK_END)) > LARGEST:  # some formats' readers take all of it into memory
                raise ConfigError(f"{file}: {size:,} bytes, expected at most {LARGEST:,}; resize it, or remove it")
            opened.seek(0)
            with Image.open(opened) as image:
                _check_pixels(file, image, megapixels)
                yield image
    except Image.DecompressionBombError:
        raise ConfigError(
            f"{file}: more than {MOST_MEGAPIXELS} million pixels, which PIL does not decode; resize it, or remove it"
        ) from None
    # A damaged file leads PIL's readers into any exception.
    except Exception as error:
        # What the operating system says of it has a number, and is let be, as is what a file of many says of it.
        if isinstance(error, ConfigError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise Damaged(f"{file}: PIL cannot read it ({one_line(error)}); replace or delete the file") from None


def _check_pixels(file: Path | Member, image: ImageFile.ImageFile, megapixels: int) -> None:
    width, height = image.size
    if width * height > megapixels * 1_000_000:
        raise ConfigError(
            f"{file}: {width}x{height} pixels, expected at most data.max_megapixels={megapixels} million; resize it, "
            f"remove it, or raise the setting, up to {MOST_MEGAPIXELS}"
        )


def read_header(file: Path | Member, megapixels: int = MEGAPIXELS) -> tuple[str, tuple[int, int]]:
    """PIL's mode and a picture's size (width, height) as it is to be looked at, without decoding it.

    Raises:
        ConfigError: if PIL does not know the file, or it is too large.
        OSError: if it cannot be read at all.

    """
    with _opened(file, megapixels) as image:
        width, height = image.size
        # Turned by a right angle when it is decoded; of TIFF, PIL has turned the size.
        lies = image.format != "TIFF" and image.getexif().get(ExifTags.Base.Orientation, 1) in ON_ITS_SIDE
        return image.mode, (height, width) if lies else (width, height)


def read_picture(file: Path | Member, form: ImageForm) -> UInt8[Tensor, "c h w"]:
    """Decode a picture; see `image_folder` for what becomes of alpha, palettes and sizes.

    Raises:
        OSError: if the file cannot be read at all.
        ConfigError: if it is damaged, too large, deeper than 8 bits, coloured in a grey set, or of another size.

    """
    with _opened(file, form.megapixels) as image:
        deep = _deep(image)  # which decoding forgets
        if getattr(image, "is_animated", False):
            _say_once("frames", f"{file}: the first of its frames is read; likewise of other pictures")
        image.load()
        _turn(image, file)
    if deep:
        raise ConfigError(f"{file}: {deep}, expected 8 bits a channel; convert the file")
    pixels = np.asarray(_resized(_flat(image, file, form.grey), file, form))
    return torch.tensor(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1).contiguous()


_said: set[str] = set()  # what was said of a first picture in this process


def _say_once(what: str, message: str) -> None:
    if what not in _said:
        _said.add(what)
        note(message)


def _turn(image: Image.Image, file: Path | Member) -> None:
    """Turn a decoded picture as its EXIF orientation says, in place; said of the first one in a process."""
    orientation = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    if orientation in TURNED:
        _say_once("turned", f"{file}: rotated by its EXIF orientation ({orientation}); other pictures are, too")
        ImageOps.exif_transpose(image, in_place=True)


def _deep(image: ImageFile.ImageFile) -> str:
    """Describe the depth of an undecoded picture with more than 8 bits a channel; empty if it has no more."""
    if image.mode in DEEP_MODES:
        return f"mode {image.mode}"
    for tile in image.tile:
        for found in tile.args if isinstance(tile.args, tuple) else (tile.args,):
            if isinstance(found, str) and DEEP_RAW.search(found):
                return f"mode {found}"
            if tile.codec_name == "ppm" and isinstance(found, int) and found > WHITE:
                return f"values up to {found}"
    return ""


def _flat(image: Image.Image, file: Path | Member, grey: bool) -> Image.Image:
    """Without alpha, in mode L or RGB."""
    if grey and image.mode not in GREY_MODES:
        raise ConfigError(
            f"{file}: mode {image.mode}, expected grey like the set's other pictures; convert it to grey, or the "
            "others to RGB"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if grey else "RGB")


def _resized(image: Image.Image, file: Path | Member, form: ImageForm) -> Image.Image:
    if form.how is None:
        if image.size != form.size:
            sizes = " and ".join("{}x{}".format(*size) for size in (image.size, form.size))
            raise ConfigError(
                f"{file}: its size and the first picture's are {sizes} (width x height), expected the same; "
                f"set data.image_size={min(form.size)}"
            )
        return image
    side = form.size[0]
    while min(image.size) >= 2 * side:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    if form.how == "stretch":
        return image.resize(form.size, Image.Resampling.BICUBIC)
    # The short side resized to `side`, then the middle of the long one.
    short = min(image.size)
    width, height = (side if n == short else round(n * side / short) for n in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side))


class ImageFiles:
    """A store of pictures."""

    def __init__(self, root: Path | Source, names: Sequence[str], form: ImageForm):
        """Make the store of files `names` below `root`."""
        self.root, self.form = root, form
        # One block of bytes: a million strings would take each worker far longer to unpickle.
        self.names = np.array([os.fsencode(name) for name in names])

    def __len__(self) -> int:
        """The number of pictures."""
        return len(self.names)

    def __getitem__(self, index: int) -> UInt8[Tensor, "c h w"]:
        """Decode one.

        Raises:
            OSError, ConfigError: as `read_picture`.

        """
        return read_picture(self.file(index), self.form)

    def file(self, index: int) -> Path | Member:
        """Where it lies."""
        return self.root / os.fsdecode(self.names[index])

    def origin(self, index: int) -> str:
        """Return its name for messages."""
        return str(self.file(index))
