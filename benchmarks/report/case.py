"""What the page knows of a case: the code it measures, its headline, its tables and figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.report.drawing import Drawn
from benchmarks.report.reading import Measurement, Result
from benchmarks.report.tables import Judge, Table

TIMING = ("fullstride/measure/timing.py", "fullstride/measure/roofline.py", "fullstride/measure/flops.py")
# Of a training step of MeanFlow, by one process or by several.
MEANFLOW_STEP = (
    "fullstride/meanflow/objective/derivative.py",
    "fullstride/meanflow/objective/loss.py",
    "fullstride/meanflow/training/derivative_check.py",
    "fullstride/meanflow/models",
    "fullstride/meanflow/objective/times.py",
    "fullstride/meanflow/objective/weighting.py",
    "benchmarks/cases/meanflow/step_cases.py",
    "benchmarks/cases/meanflow/step_setup.py",
    "fullstride/jvp",
    "fullstride/step/torch",
    "fullstride/device/cuda_graph.py",
    *TIMING,
)


def no_tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """None besides every row."""
    return []


def no_figures(results: Sequence[Result]) -> list[Drawn]:
    """None."""
    return []


def no_finding(results: Sequence[Result]) -> "Finding | None":
    """None."""
    return None


def first_on_gpu(results: Sequence[Result]) -> Result:
    """The first result on a GPU, else the first."""
    return min(results, key=lambda result: result.data["device"] == "cpu")


def first(result: Result) -> Measurement:
    """The first row."""
    return result.rows[0]


@dataclass(frozen=True)
class Finding:
    """A case in one number.

    Attributes:
        value: the number with its unit.
        text: what it is, under which conditions.

    """

    value: str
    text: str


@dataclass(frozen=True)
class Case:
    """How results of one case are shown.

    Attributes:
        name: as `python -m benchmarks` calls it.
        title: of its section.
        about: what is measured and how to read it.
        paths: the code that its times depend on, relative to the repository, as git's pathspecs.
        packages: whose versions matter.
        headline: the row that stands for a result in the overview.
        finding: the case in one number, by a rule that does not look for the best; results come newest first.
        tables: of all results of the case.
        figures: the same.
        has_floor: whether a result's times have roofline bounds of their own; a host's do not have the device's.

    """

    name: str
    title: str
    about: str = ""
    paths: tuple[str, ...] = ("fullstride",)
    packages: tuple[str, ...] = ()
    headline: Callable[[Result], Measurement] = first
    finding: Callable[[Sequence[Result]], Finding | None] = no_finding
    tables: Callable[[Sequence[Result], Judge], list[Table]] = no_tables
    figures: Callable[[Sequence[Result]], list[Drawn]] = no_figures
    has_floor: Callable[[Result], bool] = lambda result: True
