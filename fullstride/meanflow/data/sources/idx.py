"""The IDX format of MNIST's family: a magic number, the sizes, the bytes; and files that may be packed by gzip."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from fullstride.errors import ConfigError


def read_packed(file: Path) -> bytes:
    """The content of a file, unpacked if it is packed, whatever its name.

    Raises:
        ConfigError: for a packed file that is damaged.

    """
    data = file.read_bytes()
    try:
        return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file}: {error}; damaged, get it again") from None


UBYTE = 8


def read_idx(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The array of bytes in a file, packed by gzip or not; it is read-only.

    Args:
        file: two zero bytes, one for the type of the elements, one for the number of axes, the sizes as big-endian
            32-bit numbers, the elements.
        shape: what the file must hold.

    Raises:
        ConfigError: for a file that holds anything else, or not all of it.

    """
    data = read_packed(file)
    header = struct.pack(f">HBB{len(shape)}I", 0, UBYTE, len(shape), *shape)
    if (found := data[:4]) != header[:4]:
        raise ConfigError(f"{file}: magic number 0x{found.hex()}, expected 0x{header[:4].hex()}: not this IDX file")
    if data[: len(header)] != header:
        sizes = struct.unpack_from(f">{min(len(shape), len(data) // 4 - 1)}I", data, 4)
        raise ConfigError(f"{file}: sizes {sizes}, expected {shape}: cut short, or of another data set")
    if (count := len(data) - len(header)) != math.prod(shape):
        raise ConfigError(f"{file}: {count} bytes after its header, expected {math.prod(shape)}: damaged, get it again")
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape)
