"""Made-up data sets on disk and in memory."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fullstride.errors import ConfigError
from fullstride.meanflow.data.sources.image_files import ImageFiles, ImageForm


def pixels(rng: np.random.Generator, size: tuple[int, int], mode: str = "RGB") -> np.ndarray:
    channels = len(Image.new(mode, (1, 1)).getbands())
    width, height = size
    shape = (height, width) if channels == 1 else (height, width, channels)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def write_picture(file: Path, rng: np.random.Generator, size=(7, 5), mode: str = "RGB") -> np.ndarray:
    """Random pixels, written without loss; returns them as (h, w) or (h, w, c)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    made = pixels(rng, size, mode)
    Image.fromarray(made).save(file)
    return made


def write_folder(root: Path, rng: np.random.Generator, count: int, size=(7, 5)) -> torch.Tensor:
    """A flat folder of PNGs; its pictures, (n, c, h, w), in the order of their names."""
    made = [write_picture(root / f"{i:04d}.png", rng, size) for i in range(count)]
    return torch.tensor(np.stack(made)).permute(0, 3, 1, 2)


def store_of(root: Path, size=(7, 5)) -> ImageFiles:
    return ImageFiles(root, sorted(p.name for p in root.iterdir()), ImageForm(False, size, None))


class Counting:
    """A store of records that are known without reading: (1, 2, 3) numbers from `first` on; one may be refused."""

    def __init__(self, count: int, first: int = 0, refused: int | None = None):
        self.count, self.first, self.refused = count, first, refused

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.refused:
            raise ConfigError(f"record {index}: refused")
        return self.first + 10 * index + torch.arange(6).reshape(1, 2, 3)
