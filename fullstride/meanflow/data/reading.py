"""Repeated reads while a disk is away for a moment, and replacement of damaged records up to a limit."""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from jaxtyping import Int
from torch import Tensor

from fullstride.errors import ConfigError, Damaged, ReadError, one_line
from fullstride.runs.atomic_files import note

T = TypeVar("T")

# Seconds before each of the next tries: 15 in all, which a remounted disk or a server that restarts needs.
WAITS = (0.1, 0.4, 1.5, 4.0, 9.0)
# What a disk says that may be there again soon; on one that is not mounted no file is there.
TRANSIENT = {
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "ECOMM", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "EINTR",
        "EIO", "EMFILE", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENFILE", "ENODEV", "ENOENT", "ENOLINK", "ENOMEM",
        "ENONET", "ENOTCONN", "ENXIO", "EREMOTEIO", "ESHUTDOWN", "ESTALE", "ETIMEDOUT",
    )
    if hasattr(errno, name)
}  # fmt: skip


def read_again(read: Callable[[], T], origin: Callable[[], str]) -> T:
    """Call `read`, again for some seconds where the disk may come back.

    Args:
        read: raises OSError where the operating system cannot read, and something else for damage.
        origin: function that names the record.

    Raises:
        ReadError: if it still cannot be read, or at once for a reason that time does not change, such as its rights.

    """
    for tries, wait in enumerate((*WAITS, None), 1):
        try:
            return read()
        except ReadError:
            raise
        except OSError as error:
            if wait is None or error.errno not in TRANSIENT:
                again = f" at {tries} tries in {sum(WAITS):g} s" if tries > 1 else ""
                raise ReadError(f"{origin()}: cannot be read{again} ({one_line(error)})") from None
            if tries == 1:
                note(f"{origin()}: cannot be read ({one_line(error)}); retrying for {sum(WAITS):g} s")
            time.sleep(wait)
    raise AssertionError  # the last try returns or raises


def refuse_if_away(error: OSError) -> None:
    """Raise for what may be there again soon; a file that is not there, and other things, are let be.

    Raises:
        ReadError: if the disk is away.

    """
    if error.errno in TRANSIENT - {errno.ENOENT}:
        raise ReadError(f"{error.filename}: cannot be read ({one_line(error)})") from None


@dataclass
class SkippedRecords:
    """The damaged records of a data set that were passed over, each counted once.

    Attributes:
        limit: largest allowed number of damaged records.
        found: the message about each.

    """

    limit: int
    found: set[str] = field(default_factory=set)

    def add(self, messages: list[str]) -> None:
        """Count some, each told on stderr once.

        Raises:
            ConfigError: when there are more than the limit.

        """
        for message in messages:
            if message in self.found:
                continue
            self.found.add(message)
            if len(self.found) > self.limit:
                raise ConfigError(
                    f"{message}; {len(self.found)} are damaged, more than data.skip_damaged={self.limit} allows"
                )
            note(f"skipped, {len(self.found)} of data.skip_damaged={self.limit}: {message}")


def read_or_next(read: Callable[[int], Tensor], labels: Int[Tensor, " n"], index: int) -> tuple[Tensor, list[str]]:
    """A record, or in the place of a damaged one the next of its class that is whole; and what was said of those.

    The same one in every process and at every reading, so that a run that is resumed sees what it would have seen.

    Args:
        read: gives a record by its index.
        labels: the label of each record.
        index: index of the requested record.

    Raises:
        ConfigError: if no record of the class is whole.

    """
    said: list[str] = []
    for place in (*range(index, len(labels)), *range(index)):
        if labels[place] == labels[index]:
            try:
                return read(place), said
            except Damaged as error:
                said.append(str(error))
    raise ConfigError(f"{said[0]}; no other record of its class is intact")
