"""Environment that torchrun gives to each process; a process started by hand is the only one."""

import os


def rank() -> int:
    """Which of the processes this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Which of the processes on its machine this is, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def by_torchrun() -> bool:
    """Return whether the environment gives an address at which the processes meet."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def machines() -> int:
    """On how many machines they are."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def restarts() -> int:
    """How often torchrun has started all of them anew after one had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
