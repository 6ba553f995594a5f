"""Files of weights that others made: read as tensors, never run as a pickle."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError


def first_line(error: Exception) -> str:
    """First line of an exception's message; its type's name if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def read_weights(path: Path, expected: str) -> dict[str, Tensor]:
    """The tensors by name in a file of torch.save, old or new, on the CPU.

    Args:
        path: the file.
        expected: which file that is, for the message.

    Raises:
        ConfigError: if it is missing, damaged or holds anything else.

    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected {expected}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    # A damaged pickle raises whatever its bytes happen to mean, and torch's own advice is to run it.
    except Exception as error:
        raise ConfigError(f"{path}: not a file of weights ({type(error).__name__}); expected {expected}") from None
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"{path}: holds more than a dictionary of tensors; expected {expected}")
    return dict(state)


def load_weights(model: nn.Module, state: Mapping[str, Tensor], path: Path, expected: str) -> None:
    """Load every tensor into its place.

    Raises:
        ConfigError: if names or shapes differ.

    """
    own = {name: value.shape for name, value in model.state_dict().items()}
    found = {name: value.shape for name, value in state.items()}
    if differing := sorted(name for name in own.keys() | found.keys() if own.get(name) != found.get(name)):
        name = differing[0]
        raise ConfigError(
            f"{path}: {len(differing)} tensors do not match the network; the first is {name} of shape "
            f"{_shape(found.get(name))} instead of {_shape(own.get(name))}; expected {expected}"
        )
    model.load_state_dict(state)


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))


def weights_sha256(state: Mapping[str, Tensor]) -> str:
    """sha256 over names, shapes, types and bytes of tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
