"""Executables of an engine's programs on disk, so that a later start neither traces nor compiles them.

XLA's own cache is asked by the traced program, and tracing takes Python a third of a second a program, one after the
other.
"""

import contextlib
import hashlib
import logging
import os
import pickle
import time
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

import fullstride
from fullstride.llm.kernels.cuda import chain
from fullstride.llm.progress import programs_folder
from fullstride.runs.atomic_files import write_best_effort

logger = logging.getLogger(__name__)

# How long an executable is kept that no start reads: each version of this package, of JAX or of the driver has its own.
KEPT_SECONDS = 30 * 86400.0
SOURCES = (".py", ".cu", ".cuh")
_DIGEST = hashlib.sha256().digest_size


class ProgramCache:
    """Executables for one device and for everything else that they depend on.

    They are pickles: who can write to the cache can run code, as with XLA's cache.
    """

    def __init__(self, device: Any, identity: Sequence[Any], folder: Path | None = None):
        """Read nothing yet.

        Args:
            device: device that the programs run on.
            identity: what the programs depend on besides their keys, this package, JAX and the device; values whose
                `repr` tells them apart.
            folder: cache folder; by default `programs` in fullstride's cache.

        """
        self.device, self._identity = device, "\n".join(map(repr, (*_surroundings(device), *identity)))
        self._folder = programs_folder() if folder is None else folder

    def path(self, key: Hashable) -> Path:
        """Return where the executable of a key lies."""
        return self._folder / f"{hashlib.sha256(f'{key!r} {self._identity}'.encode()).hexdigest()}.bin"

    def get(self, key: Hashable, lower: Callable[[], Any], options: dict[str, Any] | None = None) -> Any:
        """Return the executable of a key; one that is missing or damaged is traced, compiled and written.

        Args:
            key: name of the program.
            lower: function that traces it.
            options: XLA's options for its compilation.

        """
        if (found := self._read(path := self.path(key))) is not None:
            return found
        lowered = lower()
        compiled = lowered.compile(options)
        try:
            content = _written(compiled, chain.used_by(lowered.as_text()))
        except Exception as error:  # whatever JAX cannot write runs all the same
            logger.warning("the program %s is not cached: %s", key, error)
        else:
            write_best_effort(path, content)
        return compiled

    def _read(self, path: Path) -> Any:
        try:
            content = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a folder that can only be read
            os.utime(path)
        digest, body = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(body).digest() != digest:
            logger.warning("%s is damaged: compiling its program again", path)
            return None
        try:
            return _loaded(body, self.device)
        except Exception as error:  # such as of a driver that is older than the one it was compiled for
            logger.warning("%s cannot be loaded (%s): compiling its program again", path, error)
            return None

    def remove_unused(self) -> None:
        """Remove what no start has read for `KEPT_SECONDS`; at the end of one, which has read what it needs."""
        oldest = time.time() - KEPT_SECONDS
        for path in self._folder.glob("*.bin"):
            with contextlib.suppress(OSError):  # another process may have removed it
                if path.stat().st_mtime < oldest:
                    path.unlink()


def _loaded(body: bytes, device: Any) -> Any:
    program, chains, places = pickle.loads(body)
    for links in chains:
        chain.ready(links)
    trees = map(jax.tree.structure, places)
    return serialize_executable.deserialize_and_load(program, *trees, execution_devices=[device])


def _written(compiled: Any, chains: Any) -> bytes:
    program, *trees = serialize_executable.serialize(compiled)
    # A tree's structure cannot be pickled, a tree can.
    places = [jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in trees]
    body = pickle.dumps((program, chains, places))
    return hashlib.sha256(body).digest() + body


def _surroundings(device: Any) -> tuple[Any, ...]:
    """Return what programs depend on besides what the engine tells: this package, JAX's settings, XLA, the device."""
    versions = jax.__version__, jaxlib.__version__, device.client.platform_version
    settings = sorted(jax.config.values.items())
    return _package(), versions, device.device_kind, device.id, settings, os.environ.get("XLA_FLAGS")


@cache
def _package() -> str:
    root, digest = Path(fullstride.__file__).parent, hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in SOURCES):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()
