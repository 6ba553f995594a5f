import io
import json

import pytest
from rich.console import Console

from fullstride.bench.table import json_line, result_table
from tests.bench.made import made_result


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


def test_conditions_and_ceilings_stand_beside_the_numbers(shown):
    text = "\n".join(shown)
    assert "meanflow-step: model unet, precision bf16, backend eager, batch_size 64" in text
    assert "790 TFLOP/s (8192^3 bfloat16), 4.28 TB/s copy" in text


def test_one_line_holds_the_same_numbers_for_programs():
    line = json_line(made_result())
    assert "\n" not in line
    assert "samples_ms" not in line
    told, whole = json.loads(line), made_result().to_dict()
    assert told["rows"][1]["timing"] == {
        key: value for key, value in whole["rows"][1]["timing"].items() if key != "samples_ms"
    }
    assert [row["over_floor"] for row in told["rows"]] == [2.0, (1 / 3) / 0.25]
    assert told["ceilings"] == {"flops": 7.9e14, "bytes": 4.28e12, "gemm": "8192^3 bfloat16", "copy": 1 << 30}
    for key in ("schema", "case", "device", "conditions", "gate", "environment"):
        assert told[key] == whole[key]
