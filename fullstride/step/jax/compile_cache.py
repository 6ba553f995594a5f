"""Persistent cache of XLA's results, so that the same step compiles once for a machine."""

from pathlib import Path

import jax

from fullstride.assets.fetch import cache_folder


def keep_compiled(folder: str | Path | None = None, *, seconds: float = 1.0) -> Path:
    """Cache every compilation of `seconds` or more, for this and later processes.

    Args:
        folder: cache folder; by default `xla` in fullstride's cache, which FULLSTRIDE_CACHE moves.
        seconds: what takes less is compiled anew.

    Returns:
        The folder.

    """
    path = cache_folder() / "xla" if folder is None else Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
