"""How often JAX compiled in this process, which after an engine's start it must not; what it keeps on disk."""

import jax
from jax.experimental.compilation_cache import compilation_cache

# What takes less is compiled anew.
SECONDS = 0.5

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    _count += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)


def compiles() -> int:
    """Programs that were compiled, or taken from the persistent cache, since this module was first imported."""
    return _count


def keep() -> None:
    """Keep compiled programs on disk in fullstride's cache, unless JAX was told already where to keep them."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        from fullstride.step.jax.compile_cache import keep_compiled

        keep_compiled(seconds=SECONDS)
        # JAX looks for a cache once: at the first compile, which may have been before this.
        compilation_cache.reset_cache()
