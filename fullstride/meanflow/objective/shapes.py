"""Batches of any rank: rows of a table, sounds, pictures, films; and one line about what has another shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor

Conditions = Mapping[str, Tensor]  # what else the network is called with, by keyword: label, condition


@dataclass(frozen=True)
class Draw:
    """Arguments of `MeanFlowLoss.at`, checked.

    Attributes:
        x: data (b, ...).
        e: noise of its shape.
        t: the later times (b,).
        r: the earlier times (b,).
        conditions: further arguments of the network, the label among them, each with an entry for each sample.
        progress: share of the run that is done (b,), if the loss is scheduled.

    """

    x: Float[Tensor, "b *s"]
    e: Float[Tensor, "b *s"]
    t: Float[Tensor, " b"]
    r: Float[Tensor, " b"]
    conditions: Conditions
    progress: Float[Tensor, " b"] | None


@dataclass(frozen=True)
class PathBatch(Draw):
    """Samples on their paths: noise and data once mixed.

    Attributes:
        z: points z_t (b, ...).
        v: their velocities, as the target has them.
        count: number of samples that are differentiated, the first ones.

    """

    z: Float[Tensor, "b *s"]
    v: Float[Tensor, "b *s"]
    count: int

    def part(self, which: slice) -> "PathBatch":
        """Some of the samples, all differentiated."""
        given = {name: value[which] for name, value in self.conditions.items()}
        progress = None if self.progress is None else self.progress[which]
        x, e, t, r, z, v = (each[which] for each in (self.x, self.e, self.t, self.r, self.z, self.v))
        return PathBatch(x, e, t, r, given, progress, z, v, len(t))


def over_elements(time: Shaped[Tensor, " b"], x: Shaped[Tensor, "b *s"]) -> Shaped[Tensor, "b *ones"]:
    """A number for each sample as a factor of all its elements: (b, 1, ..., 1), of x's rank.

    Raises:
        ValueError: if there is not one number for each sample.

    """
    check_times(x, time)
    return time.reshape(-1, *[1] * (x.ndim - 1))


def check_times(x: Tensor, *times: Tensor) -> None:
    """Check that there is one time for each sample: others would be broadcast, to wrong numbers.

    Raises:
        ValueError: if there is not.

    """
    for time in times:
        if time.shape != x.shape[:1]:
            raise ValueError(f"times are {tuple(time.shape)}, expected one for each of the samples of {tuple(x.shape)}")


def check_batch(x: Tensor) -> None:
    """Check that x can be a batch of data: samples of one element or more, in floating numbers.

    Raises:
        ValueError: if it cannot.

    """
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}, expected a floating dtype; convert bytes with x.float() / 127.5 - 1")
    if x.ndim == 0 or x.numel() == 0:
        raise ValueError(
            f"x is {tuple(x.shape)}, expected (b, ...): at least one sample, each of at least one element; drop an "
            "empty last batch"
        )


def check_conditions(x: Tensor, conditions: dict[str, Tensor]) -> None:
    """Check that each condition, such as a label, has an entry for each sample.

    Raises:
        ValueError: naming the one that has not.

    """
    for name, value in conditions.items():
        if value.shape[:1] != x.shape[:1]:
            raise ValueError(f"{name} is {tuple(value.shape)} for x of {tuple(x.shape)}, expected {len(x)} entries")


def like(z: Tensor, value: Any, what: str = "the network's output") -> Tensor:
    """The value itself, which is a tensor of z's shape: another one would be broadcast, to wrong numbers.

    Raises:
        ValueError: if it is not.

    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} is a {type(value).__name__}, expected a tensor of z's shape {tuple(z.shape)}")
    if value.shape != z.shape:
        raise ValueError(f"{what} is {tuple(value.shape)}, expected {tuple(z.shape)}, the shape of z")
    return value
