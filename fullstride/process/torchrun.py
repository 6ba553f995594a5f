"""Environment that torchrun gives to each process; a process started by hand is the only one."""

import os


def rank() -> int:
    """Return the rank of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes that were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the rank of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def by_torchrun() -> bool:
    """Return whether the environment gives an address at which the processes meet."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def machines() -> int:
    """Return the number of machines."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def restarts() -> int:
    """Return how often torchrun has restarted all processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
