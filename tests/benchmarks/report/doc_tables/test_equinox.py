"""Tables about Equinox's training steps: each cell is the number of its machine's file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.results import Row
from benchmarks.report.doc_tables import equinox, headlines
from benchmarks.report.markdown import MarkdownTable
from benchmarks.report.reading import Folder, read_folder
from benchmarks.report.tables import number
from tests.benchmarks.report.made import RANDOM, ms, row, write_rows
from tests.benchmarks.report.markup import as_number, cells_of

# By device, then by name.
Rows = dict[str, dict[str, Row]]


def _on_both(path: Path, section: str, make: Callable[[], list[Row]]) -> tuple[Folder, Rows]:
    """Results of a section on both machines, each of its own rows, and what was asked of two ways."""
    made = {device: make() for device in equinox.MACHINES}
    for device, rows in made.items():
        targets = [
            {"name": "TrainStep", "against": "flat list", "limit": 1.5, "passed": device == "cpu", **_ratio()},
            {"name": "flat list", "against": "filter_jit", "limit": 0.25, "passed": True, **_ratio()},
        ]
        write_rows(path, "train-step", rows, device=device, model="base", section=section, targets=targets)
    # A model of another size is in no table of these.
    folder = write_rows(path, "train-step", make(), model="large", section=section, targets=[])
    return folder, {device: {r.name: r for r in rows} for device, rows in made.items()}


def _ratio() -> dict[str, float]:
    return {"ratio": RANDOM.uniform(0.1, 2), "p10": RANDOM.uniform(0.1, 2), "p90": RANDOM.uniform(0.1, 2)}


def _calls() -> list[Row]:
    ways = [
        row(name, host={"median_ms": ms()}, over_flat={"ratio": RANDOM.uniform(0.1, 99)}, arrays=7)
        for name in equinox.WAYS
    ]
    return [*ways, row("a part"), row("another part")]


def _times(rows: Rows, name: str) -> list[float]:
    return [of[name].timing.median_ms for of in rows.values()]


def test_calls_of_a_step_stand_side_by_side_for_both_machines(tmp_path):
    folder, rows = _on_both(tmp_path, "host", _calls)
    assert len(folder.results) == 3
    table = equinox.dispatch(folder)
    assert cells_of(table, "way") == ["ms, CPU", "ms, host of a GPU"]
    for name in equinox.WAYS:
        assert [as_number(cell) for cell in cells_of(table, name)] == pytest.approx(_times(rows, name), rel=6e-3)
    for name in ("a part", "another part"):
        assert cells_of(equinox.parts(folder), name) == [f"{time:.3f}" for time in _times(rows, name)]
    assert "a part" not in str(table)
    assert "TrainStep" not in str(equinox.parts(folder))


@pytest.mark.parametrize("device", equinox.MACHINES)
def test_calls_on_one_machine_have_their_spread_and_the_time_until_they_came_back(tmp_path, device):
    folder, rows = _on_both(tmp_path, "host", _calls)
    table = equinox.host(device, folder)
    for name in equinox.WAYS:
        of = rows[device][name]
        timing, extra = of.to_dict()["timing"], of.extra
        spread = f"{timing['p10_ms']:.3f}-{timing['p90_ms']:.3f}"
        told = (f"{extra['over_flat']['ratio']:.2f}", f"{extra['host']['median_ms']:.2f}")
        assert cells_of(table, name) == [f"{timing['median_ms']:.3f}", spread, *told]
    assert "a part" not in str(table)


def test_what_was_asked_stands_beside_what_came_of_it(tmp_path):
    folder, _ = _on_both(tmp_path, "host", _calls)
    asked = {r.data["device"]: r.conditions["targets"] for r in folder.results if r.conditions["model"] == "base"}
    for place, (name, limit) in enumerate((("TrainStep / flat list", "1.5"), ("flat list / filter_jit", "0.25"))):
        each = (asked[device][place] for device in equinox.MACHINES)
        cpu, gpu = (f"{t['ratio']:.3f} ({t['p10']:.3f}-{t['p90']:.3f})" for t in each)
        missed = "" if place else ", **missed**"
        assert cells_of(equinox.targets(folder), name) == [limit, cpu, f"{gpu}{missed}"]


@pytest.mark.parametrize("device", equinox.MACHINES)
def test_times_stand_by_the_number_of_arrays(tmp_path, device):
    counts: dict[str, int] = dict(zip(equinox.SIZES, RANDOM.sample(range(2, 9999), 3), strict=True))
    names = [(way, size) for size in equinox.SIZES for way in ("filter_jit", "flat list", "TrainStep")]
    folder, rows = _on_both(
        tmp_path, "leaves", lambda: [row(f"{way}, {size}", arrays=counts[size]) for way, size in names]
    )
    table = equinox.leaves(device, folder)
    assert cells_of(table, "ms, by arrays") == [f"{size}, {count:,}" for size, count in counts.items()]
    for way in ("filter_jit", "flat list", "TrainStep"):
        times = (rows[device][f"{way}, {size}"].timing.median_ms for size in equinox.SIZES)
        assert cells_of(table, way) == [f"{time:.3f}" for time in times]


def _over() -> dict[str, Any]:
    low, middle, high = sorted(RANDOM.uniform(0.5, 9) for _ in range(3))
    return {"ratio": middle, "interval": [low, high]}


def _step(way: str, mode: str) -> Row:
    """A whole step; the bare executable's ratios to itself have no interval."""
    keys = ("over_bare", "free_over_bare", "cpu_over_bare")
    bare = {"ratio": 1.0, "interval": [1.0, 1.0]}
    over = {key: bare if way == "bare executable" else _over() for key in keys}
    return row(f"{way}, {mode}", free={"median_ms": ms(), "first_ms": 1e3 * ms()}, **over)


def _told(over: dict[str, Any]) -> str:
    low, high = over["interval"]
    return f"{over['ratio']:.3f} ({low:.3f}-{high:.3f})"


def test_steps_on_a_cpu_have_their_processor_time_by_mode(tmp_path):
    rows = [_step(way, mode) for mode in equinox.MODES for way in ("bare executable", "filter_jit", "TrainStep")]
    table = equinox.cpu_steps(write_rows(tmp_path, "train-step", rows, device="cpu", section="step", **equinox.TINY))
    found = {r.name: r for r in rows}
    assert cells_of(table, "way") == list(equinox.MODES.values())
    assert cells_of(table, "bare executable") == ["1", "1"]
    for way in ("filter_jit", "TrainStep"):
        expected = [_told(found[f"{way}, {mode}"].extra["cpu_over_bare"]) for mode in equinox.MODES]
        assert cells_of(table, way) == expected


@pytest.mark.parametrize("mode", equinox.MODES)
def test_steps_on_a_gpu_are_told_waited_for_and_in_a_loop(tmp_path, mode):
    made = {each: [_step(way, each) for way in ("bare executable", "filter_jit")] for each in equinox.MODES}
    for each, rows in made.items():
        write_rows(tmp_path, "train-step", rows, section="step", mode=each, **equinox.BASE)
    table = equinox.gpu_steps(mode, read_folder(tmp_path))
    for of in made[mode]:
        way, free = of.name.partition(", ")[0], of.extra["free"]
        keys = ("over_bare", "free_over_bare")
        waited, looped = (_told(of.extra[key]) if way == "filter_jit" else "1" for key in keys)
        times = (f"{of.timing.median_ms:.2f}", waited, f"{free['median_ms']:.2f}", looped)
        assert cells_of(table, way) == [*times, f"{free['first_ms'] / 1e3:.1f}"]


def test_the_readme_tells_of_a_step_in_a_loop_beside_its_floor(tmp_path):
    ways = (headlines.GROUPED, "filter_jit", "filter_jit donated")
    made = {way: _step(way, "sdpa") for way in ways}
    shown = {"section": "step", "mode": "sdpa", "batch_size": 3, "length": 700, **equinox.BASE}
    write_rows(tmp_path, "train-step", list(made.values()), **shown)
    folder = write_rows(tmp_path, "train-step", [row(way, arrays=7) for way in ways], section="host", model="base")
    table = MarkdownTable(("what", "fullstride", "beside it", "the hardware's floor"))
    headlines._equinox(table, folder)
    looped = {way: number(of.extra["free"]["median_ms"]) for way, of in made.items()}
    beside = f"`filter_jit` donated {looped['filter_jit donated']} ms, not donated {looped['filter_jit']} ms"
    floor = f"{number(made[headlines.GROUPED].floor.ms, 3)} ms"
    of_steps = [f"**{looped[headlines.GROUPED]} ms**", beside, floor]
    assert cells_of(table, "BERT-base, a whole step of 2,100 tokens, bf16")[:-1] == of_steps
