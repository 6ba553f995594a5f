"""How much memory this machine, or the container that the process runs in, can still give."""

import operator
import os
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path, PurePosixPath

CGROUPS, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of both versions of Linux's control groups, by the controller with which a process's own group is listed (the newer
# has none): where groups lie, and of one the limit, what is used, and the statistics.
LIMITS = {
    "": (".", "memory.max", "memory.current", "memory.stat"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
}
# Of what is used: files that were read, which give way.
CACHES = ("inactive_file", "total_inactive_file")


def free_host_memory() -> int | None:
    """Bytes; None where the system does not tell."""
    return min((*_of_machine(), *_of_container()), default=None)


def _of_machine() -> Iterator[int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield from (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError):
        try:
            yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return


def _of_container() -> Iterator[int]:
    """Of the process's group and of those around it, each of which has a limit of its own."""
    for controller, (top, limit, used, statistics) in LIMITS.items():
        # Where a container sees the host's path, its mount begins at its own group: the rest of the path is not there.
        for group in accumulate(_mine(controller).parts, operator.truediv, initial=CGROUPS / top):
            try:
                most, now = (int((group / name).read_text()) for name in (limit, used))
                stat = dict(line.split() for line in (group / statistics).read_text().splitlines())
            except (OSError, ValueError):  # there is none, or its limit is "max"
                continue
            cache = max(int(stat.get(name, 0)) for name in CACHES)
            yield max(0, most - now + cache)


def _mine(controller: str) -> PurePosixPath:
    """The process's group, below the top one."""
    try:
        paths = {names: path for _, names, path in (line.split(":", 2) for line in MINE.read_text().splitlines())}
    except (OSError, ValueError):  # not Linux
        paths = {}
    found = (path for names, path in paths.items() if controller in names.split(","))
    return PurePosixPath(next(found, "").lstrip("/"))
