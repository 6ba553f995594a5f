"""Getting files over the network into a folder: from an address, or as a wheel through the user's own pip."""

import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from fullstride.process.progress import Progress

BLOCK = 1 << 20
# Bytes of a file: several times the largest that is registered.
MOST_BYTES = 1 << 30
STALL_SECONDS = 30.0
PIP_SECONDS = 900.0


def _sizes(done: int, total: int | None) -> str:
    return decimal(done) if total is None else f"{decimal(done)} of {decimal(total)}"


def download(url: str, target: Path) -> None:
    """Download the file at an address.

    Raises:
        OSError, http.client.HTTPException: for a connection that fails, stalls for 30 seconds or ends early, for a file
            of more than a GiB, and for an address that is none.

    """
    with _opened(url) as response, target.open("wb") as file:
        length = response.headers["Content-Length"] or ""
        total = int(length) if length.isdecimal() else None  # what is no number tells nothing
        _check_size(total or 0)
        with Progress("downloading", total, count=_sizes, brief=True) as progress:
            progress.status = (target.name,)
            while block := response.read(BLOCK):
                progress.at(progress.done + file.write(block))
                _check_size(file.tell())
        if total is not None and file.tell() != total:
            raise OSError(f"the connection ended after {file.tell()} of {total} bytes")


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise OSError(f"more than {decimal(MOST_BYTES)}: expected a smaller file, as all registered ones are")


def _opened(url: str) -> Any:
    """An address's answer, a context that closes the connection."""
    try:
        return urllib.request.urlopen(url, timeout=STALL_SECONDS)
    except ValueError as error:  # of urllib, for what is no address
        raise OSError(f"{url!r} is not a valid address ({error}); expected one such as https://host/file") from error


def download_wheel(requirement: str, folder: Path) -> Path:
    """Save a wheel without its dependencies; the user's pip settings choose the index, nothing is installed.

    Args:
        requirement: requirement such as `name==version`.
        folder: an empty folder.

    Raises:
        OSError: if there is no pip, or it fails.
        subprocess.SubprocessError: after a quarter of an hour.

    """
    # Only read as an archive, whichever Python or machine it was built for.
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "download", *quiet, *options, "--dest", str(folder), requirement]
    with Progress(f"downloading {requirement}"):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PIP_SECONDS)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no wheel was downloaded"]
        # With no index in reach pip's last line only says that there is no such package.
        cut_off = any("connection broken" in line for line in lines)
        raise OSError("the package index cannot be reached" if cut_off else lines[-1])
    return wheels[0]
