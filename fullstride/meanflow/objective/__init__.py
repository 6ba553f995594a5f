"""The MeanFlow objective: loss, derivative, times, weighting, guidance."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullstride.meanflow.objective.loss import MeanFlowLoss

__all__ = ["MeanFlowLoss"]


def __getattr__(name: str) -> Any:
    """Import the loss when it is asked for: its parts need not wait for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from fullstride.meanflow.objective.loss import MeanFlowLoss

    return MeanFlowLoss
