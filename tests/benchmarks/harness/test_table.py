import io

import pytest
from rich.console import Console

from benchmarks.harness.results import Row
from benchmarks.harness.table import result_table
from fullstride.measure.roofline import IMPOSSIBLE, RooflineBound
from fullstride.measure.timing import Timing
from tests.benchmarks.harness.made import ROWS, made_result


@pytest.fixture
def shown() -> list[str]:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(result_table(made_result()))
    return console.export_text().splitlines()


def test_every_row_shows_its_numbers(shown):
    (forward,) = [line.split() for line in shown if "forward" in line]
    assert forward == ["forward,", "no", "grad", "3.00", "2.2-3.8", "1.50", "2.00", "3.00", "0.8"]
    (step,) = [line.split() for line in shown if "MeanFlow 25%" in line]
    assert step == ["MeanFlow", "25%", "step", "0.33", "0.1467-10.27", "0.25", "1.33", "90.0"]


def test_a_row_below_its_bound_is_marked_and_the_mark_is_explained(shown):
    assert "(!)" not in "\n".join(shown)
    rows = [*ROWS, Row("too fast", Timing(9.0, (1.0,) * 5, None), RooflineBound(1.25, 0.1))]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(result_table(made_result(rows=rows)))
    lines = console.export_text().splitlines()
    assert [line.split()[-3:-1] for line in lines if "too fast" in line] == [["0.80", "(!)"]]
    assert IMPOSSIBLE in " ".join("\n".join(lines).split())
    assert sum("(!)" in line for line in lines) == 2


def test_conditions_and_ceilings_stand_beside_the_numbers(shown):
    text = "\n".join(shown)
    assert "meanflow-step: model unet, precision bf16, backend eager, batch_size 64" in text
    assert "790 TFLOP/s (8192^3 bfloat16), 4.28 TB/s copy" in text
