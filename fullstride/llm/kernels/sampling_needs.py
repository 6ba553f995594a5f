"""When choosing a row's token takes more than its temperature: one rule, for device arrays and for the host's numbers.

The host decides by it which program runs, the device what that program leaves out: they have to agree.
"""

from typing import Any, NamedTuple


class Wishes(NamedTuple):
    """Of one row, on the host; `Sampler` has fields of the same names and meaning, one element a row.

    Attributes:
        special: penalties, biases, a mask or min_tokens apply.
        wanted: logprobs are asked for.
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.

    """

    special: bool
    wanted: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float


def asks(s: Any) -> Any:
    """Whether a row wants more than a temperature; of `Wishes`, or elementwise of a `Sampler`."""
    return s.special | s.wanted | ((s.temperature > 0) & cuts(s))


def cuts(s: Any) -> Any:
    """Whether tokens are left out, if they are drawn at all."""
    return (s.top_k > 0) | (s.top_p < 1) | (s.min_p > 0)
