"""Names that vLLM gives to settings which mean the same here, and names of before."""

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from fullstride.errors import ConfigError

T = TypeVar("T", bound=type)

ENGINE = {
    "max_model_len": "max_length",
    "max_num_seqs": "max_sequences",
    "max_num_batched_tokens": "max_tokens_per_step",
    "enable_prefix_caching": "prefix_cache",
    "num_gpu_blocks_override": "kv_blocks",
}
# Settings of vLLM that mean something else here, and what to give instead.
DIFFERENT = {
    "gpu_memory_utilization": "it is vLLM's share of the whole GPU, with weights and activations; kv_share is the KV "
    "cache's share of the memory that is free once the weights are loaded (default 0.8)",
    "swap_space": "nothing is swapped to the host; the newest sequences are computed again when blocks run out",
    "enforce_eager": "every step is compiled; compile_cache=true keeps the programs for the next start",
}
# `SamplingParams` had these names once.
SAMPLING_BEFORE = {"structured": "structured_outputs", "include_stop": "include_stop_str_in_output"}


def own_names(
    given: Mapping[str, Any], aliases: Mapping[str, str], *, different: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Settings by this library's names.

    Args:
        given: values by name.
        aliases: other names, and what each is called here.
        different: names that are refused, and why.

    Raises:
        ConfigError: if a setting is given by both of its names, or by a name that means something else here.

    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if different and name in different:
            raise ConfigError(f"{name}={value!r} is not taken: {different[name]}")
        own = aliases.get(name, name)
        if own in found or (own != name and own in given):
            raise ConfigError(f"{own} and {name} are the same setting: give one of them")
        found[own] = value
    return found


def accepts(
    aliases: Mapping[str, str], *, different: Mapping[str, str] | None = None, deprecated: bool = False
) -> Callable[[T], T]:
    """Make a dataclass take other names of its fields, by keyword; with a warning if they are `deprecated`."""

    def with_aliases(cls: T) -> T:
        init = cls.__init__

        @wraps(init)
        def __init__(self: Any, *args: Any, **given: Any) -> None:  # noqa: N807
            if deprecated and (old := sorted(aliases.keys() & given.keys())):
                said = ", ".join(f"{name} is now {aliases[name]}" for name in old)
                warnings.warn(f"{cls.__name__}: {said}", DeprecationWarning, stacklevel=2)
            init(self, *args, **own_names(given, aliases, different=different))

        cls.__init__ = __init__  # pyright: ignore[reportAttributeAccessIssue]
        for old, new in aliases.items() if deprecated else ():
            setattr(cls, old, _old_attribute(cls.__name__, old, new))
        return cls

    return with_aliases


def _old_attribute(owner: str, old: str, new: str) -> property:
    """A field by the name that it had."""

    def read(self: Any) -> Any:
        warnings.warn(f"{owner}: {old} is now {new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(read)
