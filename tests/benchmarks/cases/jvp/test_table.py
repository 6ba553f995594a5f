import pytest
from rich.console import Console

from benchmarks.cases.jvp.common import LeftOut
from benchmarks.cases.jvp.run import errors_table, flat, table
from benchmarks.harness.results import CaseResult, Row
from fullstride.measure.roofline import Ceilings, RooflineBound
from fullstride.measure.timing import Timing

ERRORS = {"o": {"ours": 1e-3, "eager": 2e-3}, "to": {"ours": 3e-3, "eager": 2e-3}, "dq": {"ours": 4e-3}}


def _row(who, ms, peak=None, graphed=0, errors=None):
    extra = {"shape": "s", "kind": "k", "who": who, "tensor_bytes": 2_000_000, "calls_in_graph": graphed}
    return Row(who, Timing(9.0, ms, peak), RooflineBound(1.0, 0.5), extra | {"errors": errors or {}})


def _printed(out):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(out)
    return [line.split() for line in capture.get().splitlines()]


def _line(lines, who):
    (line,) = [x for x in lines if x[:3] == ["s", "k", who]]
    return line[3:]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_line_tells_time_memory_rate_floor_and_errors(device):
    rows = [
        _row("ours", (1.0, 2.0, 3.0), 5_000_000, 4, ERRORS),
        _row("eager", (2.0,), 2_000_000),
        _row("slow", (200.0,)),
    ]
    entries = [*rows, LeftOut("s", "k", "big", "no memory"), LeftOut("s", "k", "odd", "RuntimeError: of many words")]
    result = CaseResult("c", device, {"precision": "bf16"}, {}, Ceilings(1e12, 1e12, "8^3", 1, [], []), rows, {})
    lines = _printed(table(result, entries, {"rate": lambda row: f"{10 / row.timing.median_ms:g}"}))
    assert _line(lines, "ours") == ["2", "1.2-2.8", "5.0", "2.50", "5", "1", "2.00", "4.0e-03", "2.0e-03", "1.50"]
    assert _line(lines, "eager") == ["*2", "2-2", "2.0", "1.00", "5", "1", "2.00"]
    assert _line(lines, "slow") == ["200", "200-200", "0.05", "1", "200.00"]
    assert _line(lines, "big") == ["no", "memory"]
    assert _line(lines, "odd") == ["left", "out"]
    text = " ".join(" ".join(line) for line in lines)
    assert "c: precision bf16" in text
    assert ("CUDA graphs" in text) == (device == "cuda")


def test_errors_stand_beside_eagers_with_their_ratio():
    lines = _printed(errors_table({"bf16": ERRORS, "fp32": {**ERRORS, "dq": {"ours": 1e-7, "eager": 1e-7}}}))
    found = {line[0]: " ".join(line[1:]) for line in lines if line}
    assert found["to"] == "3.0e-03 (2.0e-03, 1.50) 3.0e-03 (2.0e-03, 1.50)"
    assert found["dq"] == "4.0e-03 1.0e-07 (1.0e-07, 1.00)"
    assert flat({"bf16": ERRORS})["bf16 to, eager"] == 2e-3
