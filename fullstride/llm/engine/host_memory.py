"""How much memory this machine, or the container that the process runs in, can still give."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
# Of both versions of Linux's control groups: the limit, what is used, and the statistics of it.
LIMITS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
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
    for limit, used, statistics in LIMITS:
        try:
            most, now = (int((CGROUPS / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (CGROUPS / statistics).read_text().splitlines())
        except (OSError, ValueError):  # there is none, or its limit is "max"
            continue
        cache = max(int(stat.get(name, 0)) for name in CACHES)
        yield max(0, most - now + cache)
