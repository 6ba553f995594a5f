"""The four operations that a step is made of, behind one interface; a named set of them runs or raises."""

from collections.abc import Callable

from fullstride.errors import one_of
from fullstride.llm.kernels.interface import Batch, Kernels, QKNorm, Sampled, Sampler, Shape, Whole

__all__ = ["Batch", "Kernels", "QKNorm", "Sampled", "Sampler", "Shape", "Whole", "choose"]


def _plain(backend: str) -> Kernels:
    from fullstride.llm.kernels.plain import plain

    return plain(dynamic=backend == "cpu")


SETS: dict[str, Callable[[str], Kernels]] = {"plain": _plain}


def choose(name: str, backend: str) -> Kernels:
    """The set called `name`; `auto` takes the fastest that runs on `backend`, and `Kernels.name` says which.

    Raises:
        ConfigError: for an unknown name.

    """
    one_of("kernels", name, ("auto", *SETS))
    return SETS["plain" if name == "auto" else name](backend)
