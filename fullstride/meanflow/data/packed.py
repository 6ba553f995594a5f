"""Files that may be packed by gzip."""

import gzip
import zlib
from pathlib import Path

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
