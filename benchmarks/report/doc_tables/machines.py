"""The same measurements on two machines beside each other, each number out of `benchmarks/results/`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.report.doc_tables.derivatives import of_jvp
from benchmarks.report.doc_tables.engine import WITH_AND_WITHOUT, on_gpu
from benchmarks.report.doc_tables.equinox import BASE
from benchmarks.report.doc_tables.training import BOTH, COMPILED, DIT, STEP, steps_on_gpu
from benchmarks.report.llm import rate
from benchmarks.report.markdown import MarkdownTable, of_machine, the_result, the_row
from benchmarks.report.reading import Folder, Measurement, Result
from benchmarks.report.tables import number, over_bound
from fullstride.errors import ConfigError

MACHINES = {"H200": "nvidia-h200", "H100": "nvidia-h100-80gb-hbm3"}
TF32 = STEP | {"precision": "tf32"}


@dataclass(frozen=True)
class Line:
    """A row of the table.

    Attributes:
        what: was measured, with its unit.
        find: the result among a machine's.
        name: of its row.
        value: what of the row is told.

    """

    what: str
    find: Callable[[Folder], Result]
    name: str
    value: Callable[[Measurement], float] = lambda row: row.median


def _step(conditions: Mapping[str, object]) -> Callable[[Folder], Result]:
    return lambda folder: steps_on_gpu(folder, conditions)


def _engine(section: str, kernels: str) -> Callable[[Folder], Result]:
    return lambda folder: on_gpu(folder, section, kernels, at=WITH_AND_WITHOUT)


def _whole_step(folder: Folder) -> Result:
    return the_result(folder, "train-step", section="step", **BASE, mode="sdpa", device="cuda")


def _derivative(op: str) -> Callable[[Folder], Result]:
    return partial(of_jvp, op=op)


LINES = (
    Line("MeanFlow's step, all samples in the JVP: U-Net 52M, 64, bf16; ms", _step(COMPILED), f"MeanFlow 100%, {BOTH}"),
    Line("flow matching's step of the same; ms", _step(COMPILED), f"FM MSE, {BOTH}"),
    Line("MeanFlow's step in TF32; ms", _step(TF32), f"MeanFlow 100%, {BOTH}"),
    Line("MeanFlow's step of DiT-B/2, 64, bf16; ms", _step(DIT), f"MeanFlow 100%, {BOTH}"),
    Line("attention and its derivative, B1 H24 L16384 D128; ms", _derivative("attention"),
         "long128 B1 H24 L16384 D128 forward, ours"),
    Line("its backward pass through the tangent; ms", _derivative("attention"),
         "long128 B1 H24 L16384 D128 through, ours"),
    Line("GroupNorm and its derivative, 64x128x32x32; ms", _derivative("norms"),
         "group_norm 64x128x32x32 forward, ours"),
    Line("BERT of 12 layers, a step of 64 x 512 tokens, `TrainStep` grouped; ms", _whole_step,
         "TrainStep grouped, sdpa"),
    Line("Qwen3-0.6B's shape, 4 prompts, CUDA kernels; tokens/s", _engine("small", "token"), "fullstride", rate),
    Line("256 prompts; tokens/s", _engine("large", "token"), "fullstride", rate),
    Line("a decode step of 64 rows at 400 tokens; tokens/s", _engine("sweep", "token"), "batch 64, context 400", rate),
    Line("first token of a prompt of 1,024; ms", _engine("latency", "token"), "first token, prompt of 1024"),
)  # fmt: skip


def two_machines(folder: Folder) -> MarkdownTable:
    """What was measured on either, with how many floors of its own machine it took; nothing where it was not."""
    header = (cell for name in MACHINES for cell in (name, "x bound"))
    table = MarkdownTable(("", *header))
    for line in LINES:
        found = [_found(line, of_machine(folder, machine)) for machine in MACHINES.values()]
        cells = (cell for each in found for cell in _cells(line, each))
        if sources := [each[0] for each in found if each]:
            table.add(line.what, *cells, of=sources)
    return table


def _found(line: Line, folder: Folder) -> tuple[Result, Measurement] | None:
    try:
        result = line.find(folder)
    except ConfigError:  # not measured there
        return None
    return result, the_row(result, line.name)


def _cells(line: Line, found: tuple[Result, Measurement] | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    row = found[1]
    return number(line.value(row)), over_bound(row)


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {"two-machines": two_machines}
