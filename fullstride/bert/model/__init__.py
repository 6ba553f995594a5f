"""The encoder, its heads and weights."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullstride.bert.model.bert import Bert

__all__ = ["Bert"]


def __getattr__(name: str) -> Any:
    """Import the model when it is asked for: its configuration needs no JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from fullstride.bert.model.bert import Bert

    return Bert
