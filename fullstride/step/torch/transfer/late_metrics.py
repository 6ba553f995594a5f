"""Metrics read without stalling: the host sees those of a step when the next one is on its way."""

from torch import Tensor

from fullstride.step.torch.metrics import stacked
from fullstride.step.torch.transfer.to_host import Sent


class Late:
    """Copies metrics to the host behind the step that made them.

    `late(metrics)` returns the numbers of the call before, as floats, and None the first time; `last()` waits for the
    newest. The host never waits for a step that it has just launched.
    """

    def __init__(self) -> None:
        """Nothing is on its way yet."""
        self._names: list[str] = []
        self._sent: Sent | None = None

    def __call__(self, metrics: dict[str, Tensor]) -> dict[str, float] | None:
        """The numbers before; these follow with the next call."""
        before = self.last() if self._sent is not None else None
        self._names = list(metrics)
        self._sent = Sent(stacked(metrics))
        return before

    def last(self) -> dict[str, float]:
        """The newest numbers, once they are there.

        Raises:
            ValueError: before the first call.

        """
        if self._sent is None:
            raise ValueError("no metrics were given yet, expected a call first")
        found = dict(zip(sorted(self._names), self._sent.arrived().tolist(), strict=True))
        return {name: found[name] for name in self._names}
