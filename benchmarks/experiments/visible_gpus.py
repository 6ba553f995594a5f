"""GPUs of this machine by the command line's names."""

import os
from collections.abc import Sequence

from fullstride.errors import ConfigError
from fullstride.launch.gpus import VISIBLE, count_gpus


def gpus_of(text: str, shared: bool = False) -> list[str]:
    """Parse GPUs named like `0,1` into CUDA_VISIBLE_DEVICES entries; numbers count those that are visible.

    Args:
        text: names of GPUs, separated by commas.
        shared: whether a GPU may be named more than once, to run as many commands on it at a time.

    Raises:
        ConfigError: if there is none, one that is not among the visible ones or not there at all, or one twice that may
            not be shared.

    """
    named, given = [part.strip() for part in text.split(",")], os.environ.get(VISIBLE)
    if given is not None and not given.strip():
        raise ConfigError(f"--gpus {text}: {VISIBLE} is empty, which hides every GPU; unset it, or name some in it")
    found = named if given is None else [_visible(name, given, text) for name in named]
    if not all(found):
        raise ConfigError(f"--gpus {text}: expected numbers of GPUs, as in 0,1")
    if not shared and len(set(found)) < len(found):
        raise ConfigError(f"--gpus {text}: expected each GPU once, since the command gets its minutes on one GPU alone")
    _check_there(list(dict.fromkeys(found)), text)
    return found


def _visible(name: str, given: str, text: str) -> str:
    visible = [part.strip() for part in given.split(",")]
    if name.isdigit() and int(name) < len(visible):
        return visible[int(name)]
    if name and name not in visible:
        raise ConfigError(f"--gpus {text}: {VISIBLE}={given} has no {name}; numbers count from 0 in it")
    return name


def _check_there(names: Sequence[str], text: str) -> None:
    """Refuse GPUs that do not exist: their commands would train on the CPU or fail."""
    # Of several parts of one GPU (MIG) a process finds the first alone: they are asked for one by one.
    if count_gpus(",".join(names)) == len(names) or not (absent := [name for name in names if not count_gpus(name)]):
        return
    there = count_gpus()
    remedy = f"expected {'0' if there == 1 else f'some of 0 to {there - 1}'}, as many as are visible here"
    if not there:
        remedy = f"no GPU is visible here; check nvidia-smi and {VISIBLE}, or leave --gpus out"
    raise ConfigError(f"--gpus {text}: CUDA finds no GPU {', '.join(absent)}; {remedy}")
