"""Damaged records that are passed over, up to a number of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxtyping import Int
from torch import Tensor

from fullstride.errors import ConfigError, Damaged
from fullstride.runs.atomic_files import note


@dataclass
class Skips:
    """The damaged records of a data set that were passed over, each counted once.

    Attributes:
        limit: most of them.
        found: what was said of each.

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
                    f"{message}; {len(self.found)} are damaged, data.skip_damaged={self.limit} allows less"
                )
            note(f"skipped, {len(self.found)} of data.skip_damaged={self.limit}: {message}")


def read_or_next(read: Callable[[int], Tensor], labels: Int[Tensor, " n"], index: int) -> tuple[Tensor, list[str]]:
    """A record, or in the place of a damaged one the next of its class that is whole; and what was said of those.

    The same one in every process and at every reading, so that a run that is resumed sees what it would have seen.

    Args:
        read: gives a record by its index.
        labels: of each.
        index: of the one that is wanted.

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
    raise ConfigError(f"{said[0]}; nor is another of its class whole")
