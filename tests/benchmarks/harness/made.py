"""Results as a case makes them, from known numbers."""

from dataclasses import replace
from typing import Any

from benchmarks.harness.results import CaseResult, Row
from fullstride.measure.roofline import Ceilings, RooflineBound
from fullstride.measure.timing import Timing

ENVIRONMENT: dict[str, Any] = {"cpu": "AMD EPYC", "cores": 2, "gpu": None, "commit": None, "versions": {"torch": "2"}}
ROWS = [
    Row("forward, no grad", Timing(812.5, (4.0, 2.0, 3.0), 3 << 30), RooflineBound(1.5, 0.25)),
    Row("MeanFlow 25% step", Timing(90000.0, (1 / 3, 0.1, 12.75), None), RooflineBound(0.125, 0.25), {"ratio": 0.25}),
]


def made_result(**changes: Any) -> CaseResult:
    """Return a case of two rows on a CPU."""
    ceilings = Ceilings(7.9e14, 4.28e12, "8192^3 bfloat16", 1 << 30, [1.39, 1.4], [0.5])
    conditions = {"model": "unet", "precision": "bf16", "backend": "eager", "batch_size": 64}
    made = CaseResult("meanflow-step", "cpu", conditions, {"loss": 1e-4}, ceilings, list(ROWS), ENVIRONMENT)
    return replace(made, **changes)
