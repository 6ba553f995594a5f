"""The four operations that a step is made of, behind one interface; a named set of them runs or raises."""

from collections.abc import Callable
from typing import NamedTuple

from fullstride.errors import ConfigError, one_of
from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.interface import Batch, Kernels, QKNorm, Sampled, Sampler, Shape

__all__ = ["Batch", "Kernels", "Needs", "QKNorm", "Sampled", "Sampler", "Shape", "choose"]


class Needs(NamedTuple):
    """What a set must be able to serve.

    Attributes:
        capability: of the GPU, such as `9.0`; empty elsewhere.
        dtype: of weights and pool.
        block: tokens of a block of the pool.

    """

    capability: str
    model: ModelConfig
    dtype: str
    block: int


def _plain(platform: str, needs: Needs | None) -> Kernels:
    from fullstride.llm.kernels.plain import plain

    return plain(dynamic=platform == "cpu")


def _cuda(platform: str, needs: Needs | None) -> Kernels:
    from fullstride.llm.kernels.cuda.attention import attention, refusal
    from fullstride.llm.kernels.cuda.nvrtc import library
    from fullstride.llm.kernels.plain import plain

    if needs is None or needs.capability != "9.0":
        found = needs.capability if needs and needs.capability else platform
        raise ConfigError(f"kernels=cuda: made for Hopper GPUs, of compute capability 9.0, not for {found}: take plain")
    model = needs.model
    if reason := refusal(model.heads, model.kv_heads, model.head_dim, needs.block, needs.dtype):
        raise ConfigError(f"kernels=cuda: cannot serve {reason}; take plain")
    library()
    return plain(dynamic=True)._replace(name="cuda", attention=attention)


SETS: dict[str, Callable[[str, Needs | None], Kernels]] = {"cuda": _cuda, "plain": _plain}


def choose(name: str, platform: str, needs: Needs | None = None) -> Kernels:
    """The set called `name`; `auto` takes the fastest that can serve what is needed, and `Kernels.name` says which.

    Args:
        name: `auto` or one of the sets, of which the fastest is the first.
        platform: JAX's name of it.
        needs: what is to be served; the plain set serves everything.

    Raises:
        ConfigError: for an unknown name, or a named set that cannot serve it.

    """
    one_of("kernels", name, ("auto", *SETS))
    if name != "auto":
        return SETS[name](platform, needs)
    try:
        return _cuda(platform, needs)
    except ConfigError:
        return _plain(platform, needs)
