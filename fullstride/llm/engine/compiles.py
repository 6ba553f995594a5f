"""How often JAX compiled in this process: after an engine's start it must not."""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def _listen(event: str, duration: float, **_: object) -> None:
    global _count
    _count += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)


def compiles() -> int:
    """Programs that were compiled, or taken from the persistent cache, since this module was first imported."""
    return _count
