"""What norms may be given."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_width(name: str, parameter: Tensor | None, width: int) -> None:
    """Raise unless a parameter is absent, or one number for each of `width` columns or channels."""
    if parameter is not None and parameter.shape != (width,):
        raise ValueError(f"{name} is {tuple(parameter.shape)}, expected {(width,)}")


def check_ndim(x: Tensor, least: int, shape: str) -> None:
    """Raise unless x has as many dimensions as that."""
    if x.ndim < least:
        raise ValueError(f"x is {tuple(x.shape)}, expected {shape}")


def check_last(x: Tensor, normalized: Sequence[int]) -> None:
    """Raise unless the last dimensions of x are those that are normalised."""
    if x.shape[-len(normalized) :] != tuple(normalized):
        raise ValueError(f"x is {tuple(x.shape)}, expected its last dimensions to be {tuple(normalized)}")


def check_modulation(name: str, value: Tensor, x: Tensor) -> None:
    """Raise unless `value` is one row for each sample of x."""
    expected = x.shape[0], x.shape[-1]
    if value.numel() != expected[0] * expected[1] or (value.shape[0], value.shape[-1]) != expected:
        raise ValueError(f"{name} is {tuple(value.shape)}, expected one row a sample: {expected}")


def check_groups(groups: int, channels: int, act: str | None) -> None:
    """Raise unless the channels can be grouped so, and `act` is one that there is."""
    if groups < 1 or channels % groups:
        raise ValueError(f"groups is {groups}, expected a divisor of the {channels} channels")
    if act not in (None, "silu"):
        raise ValueError(f"act is {act!r}, expected None or 'silu'")


def check_format(dtype: torch.dtype | None) -> None:
    """Raise unless results can be in this format."""
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}, expected a float format, or None for that of x")
