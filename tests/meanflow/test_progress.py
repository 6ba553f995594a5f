import io
import re

import pytest
from rich.console import Console

from fullstride.meanflow.progress import TrainingProgress


def shown(width: int, *, terminal: bool = True) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None, legacy_windows=False)
    with TrainingProgress(480_000, 12_340, console) as progress:
        for step in range(12_341, 12_346):
            progress.at(step)
        progress.report(1.65917, 15_634.2, 0.016374)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_everything_is_there_on_a_usual_terminal(width):
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(width))
    last = [line for line in re.split("[\r\n]", plain) if line.strip()][-1]
    assert "12345/480000" in last
    assert "sq. error 1.6592, 15634 images/s, 0.0164 s/step" in last
    assert re.search(r" left (\d+:\d\d:\d\d|-:--:--)", last)
    assert len(last) <= width


def test_nothing_is_shown_where_nobody_looks():
    assert shown(80, terminal=False).strip() == ""
