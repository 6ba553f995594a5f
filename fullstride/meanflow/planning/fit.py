"""The factors of the cost model as they were fitted, kept in a file with what they belong to."""

import json
from dataclasses import dataclass
from pathlib import Path

from fullstride.meanflow.planning.cost import Costs, Rates

# Written by `fullstride meanflow plan --fit`.
KEPT_FILE = Path(__file__).with_name("fitted.json")


@dataclass(frozen=True)
class FittedCosts:
    """Stored result of a fit.

    Attributes:
        machine: the GPU's name.
        memory_bytes: memory of one GPU.
        rates: the GPU's measured rates, by precision.
        costs: the factors.

    """

    machine: str
    memory_bytes: int
    rates: dict[str, Rates]
    costs: Costs


def fitted(path: Path = KEPT_FILE) -> FittedCosts:
    """The stored fit."""
    kept = json.loads(path.read_text())
    rates = {precision: Rates(**rates) for precision, rates in kept["rates"].items()}
    return FittedCosts(kept["machine"], kept["memory_bytes"], rates, Costs(**kept["costs"]))
