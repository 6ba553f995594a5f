"""A whole training step of MeanFlow beside the official code's own."""

from collections.abc import Sequence

from benchmarks.report.case import MEANFLOW_STEP, Case, Finding, first_on_gpu
from benchmarks.report.reading import Measurement, Result
from benchmarks.report.tables import Cell, Judge, Table, all_in_one, gib, number, over_bound

PACKAGES = ("torch",)
THEIRS = "py-meanflow"
READY = f"{THEIRS}, augmented before"


def finding(results: Sequence[Result]) -> Finding | None:
    """Our first step of the first result on a GPU, else of the first, beside theirs."""
    result = first_on_gpu(results)
    times = {row.name: row.median for row in result.rows}
    if THEIRS not in times:
        return None
    ours = result.rows[0]
    text = f"a whole step by {ours.name}, where {THEIRS}'s own takes {number(times[THEIRS])} ms: {result.machine}"
    return Finding(f"{number(ours.median)} ms", text)


def tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """Every row of every result."""
    header = ("code", "recipe", "ms", "p10", "p90", "bound ms", "x bound", "GiB")
    caption = (
        "Each step from its batch, which lies on the device, to the end of its work; theirs also with batches that "
        "were augmented before."
    )
    return all_in_one(results, judge, PACKAGES, header, caption, _cells)


def _cells(result: Result, row: Measurement) -> list[Cell]:
    times = [number(ms) for ms in (row.median, row.p10, row.p90, row.floor)]
    return [row.name, str(result.conditions.get("recipe")), *times, over_bound(row), gib(row.peak_bytes)]


CASE = Case(
    name="meanflow-peer",
    title="A whole step beside the official code",
    about=(
        "A training step of CIFAR-10's recipe, from zeroed gradients over augmentation, noise, loss and backward to "
        "optimizer and averages, by fullstride and by the official PyTorch code's own compiled loop."
    ),
    paths=(
        "benchmarks/cases/meanflow/peer.py",
        "benchmarks/cases/meanflow/peer_codes.py",
        "fullstride/meanflow/training/step.py",
        "fullstride/meanflow/training/guard.py",
        "fullstride/meanflow/data/edm_augment.py",
        "benchmarks/experiments/meanflow/official_code.py",
        *MEANFLOW_STEP,
    ),
    packages=PACKAGES,
    finding=finding,
    tables=tables,
)
