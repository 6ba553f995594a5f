"""Tables about training steps: each cell is the file's number, what was not measured blank, what lacks an error."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.results import Row
from benchmarks.report.doc_tables import distributed, training
from benchmarks.report.reading import Folder, read_folder
from fullstride.errors import ConfigError
from fullstride.measure.roofline import Floor
from tests.benchmarks.report.made import RANDOM, row, write_rows
from tests.benchmarks.report.markup import cells_by_row

BOTH = training.BOTH
GIB = 2**30
KINDS = (("ddp", "copies"), ("fsdp", "nccl"))


def _step(name: str, backend: str, whole: bool = True, **extra) -> Row:
    """A row of the bench of steps, with the memory of a GPU."""
    over = {"over_flow_matching": RANDOM.uniform(1, 9), "memory_over_flow_matching": RANDOM.uniform(1, 9)}
    share = {"ratio": 1.0} if whole else {}
    made = row(f"{name}, {backend}", name=name, backend=backend, **({"batch": 64} | over | share | extra))
    made = replace(made, floor=Floor(RANDOM.uniform(1, 99), 0.0))
    return replace(made, timing=replace(made.timing, peak_bytes=RANDOM.randrange(GIB, 99 * GIB)))


def _networks(path: Path, left: str = "") -> tuple[Folder, list[list[Row]]]:
    """A file of each network, with 25 % but neither 50 nor 75 % in the JVP."""
    names = [name for name in ("FM MSE", "MeanFlow 25%", "MeanFlow 100%") if name != left]
    every = [[_step(name, BOTH) for name in names] for _ in training.NETWORKS]
    for rows, conditions in zip(every, training.NETWORKS.values(), strict=True):
        write_rows(path, "meanflow-step", rows, **conditions)
    return read_folder(path), every


def test_each_network_has_its_times_and_what_was_not_measured_is_blank(tmp_path):
    folder, every = _networks(tmp_path)
    found = cells_by_row(training.networks(folder))
    for place, (name, rows) in enumerate(zip(training.NETWORKS, every, strict=True), 1):
        flow, quarter, full = (r.timing.median_ms for r in rows)
        times = [f"{flow:.2f}", f"{quarter:.2f}", "", "", f"{full:.2f}", f"{full / flow:.2f}"]
        memory = f"{rows[-1].extra['memory_over_flow_matching']:.2f} x"
        assert found[name] == [f"{rows[0].floor.ms:.1f}", *times, memory, f"[{place}]"]


def test_a_network_without_its_whole_step_is_an_error(tmp_path):
    folder, _ = _networks(tmp_path, left="MeanFlow 100%")
    with pytest.raises(ConfigError, match="no row 'MeanFlow 100%, compile"):
        training.networks(folder)


def test_batches_are_columns_and_memory_is_told_once_or_as_a_range(tmp_path):
    sizes = sorted(RANDOM.sample(range(2, 999), 3))
    memory = dict(zip(sizes, (1.011, 1.03, 1.049), strict=True))
    rows = [
        _step(name, BOTH, batch=size, ms_per_sample=RANDOM.uniform(1, 9), memory_over_flow_matching=memory[size])
        for size in sizes
        for name in ("FM MSE", "MeanFlow 100%")
    ]
    found = cells_by_row(training.batches(write_rows(tmp_path, "meanflow-step", rows, **training.BATCHES)))
    flow, full = rows[::2], rows[1::2]
    assert found["batch"] == [str(size) for size in sizes]
    assert found["FM, ms"] == [f"{r.timing.median_ms:.2f}" for r in flow]
    assert found["MF 100 %, ms"] == [f"{r.timing.median_ms:.2f}" for r in full]
    ratios = [b.timing.median_ms / a.timing.median_ms for a, b in zip(flow, full, strict=True)]
    assert found["MF 100 % / FM"] == [f"{ratio:.2f}" for ratio in ratios]
    assert found["FM, ms an image"] == [f"{r.extra['ms_per_sample']:.3f}" for r in flow]
    assert found["FM over its bound"] == [f"{r.over_floor:.1f}" for r in flow]
    peaks = [r.timing.peak_bytes or 0 for r in full]
    assert found["MF 100 %, GiB (1.01-1.05 x FM's)"] == [f"{peak / GIB:.2f}" for peak in peaks]
    assert training._range([1.006, 1.014]) == "1.01"


def _alternatives(path: Path, left: str = "") -> tuple[Folder, dict[str, Row]]:
    """Both files: A and B are not recorded, G was refused, plain operations not compiled, F is no whole step."""
    refused = "G: make_graphed_callables"
    plain = "torch.func.jvp of plain operations"
    names = [name for name in training.ALTERNATIVES.values() if name not in (left, refused)]
    recorded = [_step(n, "eager" if n[0] == "B" else "graph", n[0] != "F") for n in names if n[:2] not in ("A:", "A2")]
    without = ("B: the JVP by two VJPs", plain)
    compiled = [_step(n, "compile" if n[:2] == "A:" else BOTH, n[0] != "F") for n in names if n not in without]
    why = [{"name": refused, "backend": backend, "why": "SomeError: and more"} for backend in ("eager", "graph")]
    write_rows(path, "meanflow-step", recorded, left_out=why, **training.RECORDED)
    folder = write_rows(path, "meanflow-step", compiled, left_out=[], **training.COMPILED)
    return folder, {r.name: r for r in [*recorded, *compiled]}


def test_alternatives_say_what_is_not_recorded_what_failed_and_whose_memory_it_is(tmp_path):
    folder, rows = _alternatives(tmp_path)
    found = cells_by_row(training.alternatives(folder))
    slow, fast = (rows[f"D: split JVP, {backend}"] for backend in ("graph", BOTH))
    times = [float(cell) for cell in found["D: split JVP"]]
    expected = [value for r in (slow, fast) for value in (r.timing.median_ms, r.extra["over_flow_matching"])]
    assert times == pytest.approx([*expected, fast.extra["memory_over_flow_matching"]], abs=6e-3)
    vjps = rows["B: the JVP by two VJPs, eager"]
    assert found["B: the JVP by two VJPs"][0] == f"{vjps.timing.median_ms:.2f} *"
    assert found["B: the JVP by two VJPs"][2:4] == ["", ""]
    assert found["B: the JVP by two VJPs"][4] == f"{vjps.extra['memory_over_flow_matching']:.2f}"
    assert found["A: the network compiled, `torch.func.jvp` around it"][2].endswith(" *")
    assert found["G: `make_graphed_callables`"] == ["SomeError", "", "", "", ""]
    alone = [f"{rows[f'F: the JVP alone, {backend}'].timing.median_ms:.2f}" for backend in ("graph", BOTH)]
    assert found["F: the JVP alone"] == [alone[0], "", alone[1], "", ""]


def test_an_alternative_that_neither_file_has_is_an_error(tmp_path):
    folder, _ = _alternatives(tmp_path, left="finite difference")
    with pytest.raises(ConfigError, match="no row 'finite difference'"):
        training.alternatives(folder)


def _changes(path: Path, only: int | None = None) -> tuple[Folder, list[tuple[float, float]]]:
    times = [(RANDOM.uniform(1, 99), RANDOM.uniform(1, 99)) for _ in training.CHANGES]
    rows = [
        {**training.CHANGED, **settings, "ratio": ratio, "median_ms": ms}
        for place, (_, _, settings) in enumerate(training.CHANGES)
        for ratio, ms in zip((0.0, 1.0), times[place], strict=True)
        if only is None or (place == only and not ratio)
    ]
    RANDOM.shuffle(rows)
    (path / "meanflow-step-changes--x.json").write_text(json.dumps({"what": "changes", "rows": rows}))
    return read_folder(path), times


def test_changes_stand_beside_their_predictions_and_one_that_is_lacking_is_an_error(tmp_path):
    folder, times = _changes(tmp_path)
    found = cells_by_row(training.changes(folder))
    for (what, predicted, _), (flow, full) in zip(training.CHANGES, times, strict=True):
        assert found[what] == [predicted, f"{flow:.2f}", f"{full:.2f}", f"{full / flow:.2f}"]
    folder, _ = _changes(tmp_path, only=0)
    with pytest.raises(ConfigError, match="no row of flow matching with"):
        training.changes(folder)


def _transfers(path: Path, names: list[str]) -> tuple[Folder, dict[str, dict]]:
    def lost() -> dict[str, float]:
        return {"lost_each": RANDOM.uniform(0, 1)}

    rows = {
        name: {"alone_ms": RANDOM.uniform(1, 9), "gbs": RANDOM.uniform(9, 999), "gemm": lost(), "elementwise": lost()}
        for name in names
    }
    data = {"case": "meanflow-transfers", "device": "two GPUs", "beside": {"rows": rows}}
    (path / "meanflow-transfers--x.json").write_text(json.dumps(data))
    return read_folder(path), rows


def test_transfers_have_their_own_times_and_what_others_lose_beside_them(tmp_path):
    names = list(distributed.WAYS.values())
    folder, rows = _transfers(tmp_path, names)
    table = distributed.transfers(folder)
    for shown, name in distributed.WAYS.items():
        lost = [f"{rows[name][beside]['lost_each']:.2f}" for beside in ("gemm", "elementwise")]
        assert cells_by_row(table)[shown] == [f"{rows[name]['alone_ms']:.2f}", f"{rows[name]['gbs']:.0f}", *lost]
    assert "meanflow-transfers--x.json`: two GPUs" in str(table)
    folder, _ = _transfers(tmp_path, names[1:])
    with pytest.raises(ConfigError, match=f"no row '{names[0]}'"):
        distributed.transfers(folder)


def _scaling(path: Path, models: tuple[str, ...]) -> tuple[Folder, dict[str, Row]]:
    rows = []
    for model in models:
        rows.append(_step(f"{model}, ratio 100%", "1 process", processes=1, kind="none", efficiency=1.0))
        for kind, by in KINDS:
            extra = {"processes": 2, "kind": kind, "transfers": by, "efficiency": RANDOM.uniform(0.9, 1)}
            rows.append(_step(f"{model}, ratio 100%", f"2 processes, {kind}, {by}", **extra))
    conditions = {"model": ",".join(distributed.MODELS), "rows": "ratio-100", "processes": 2}
    conditions |= {"precision": "bf16", "backend": "compile+graph"}
    return write_rows(path, "meanflow-scaling", rows, **conditions), {r.name: r for r in rows}


def test_gpus_together_stand_beside_each_alone_and_what_was_wanted_is_bold(tmp_path):
    folder, rows = _scaling(tmp_path, tuple(distributed.MODELS))
    found = cells_by_row(distributed.scaling(folder))
    assert [found["each GPU alone, all at once"][place] for place in (1, 4)] == ["", ""]
    for kind, by in KINDS:
        cells = found[f"`{kind}`, `{by}`"]
        for place, model in enumerate(distributed.MODELS):
            of = rows[f"{model}, ratio 100%, 2 processes, {kind}, {by}"]
            time, linear, memory = cells[3 * place : 3 * place + 3]
            assert time.startswith(f"{of.timing.median_ms:.2f} (")
            percent = 100 * of.extra["efficiency"]
            assert float(linear.strip("* %")) == pytest.approx(percent, abs=0.06)
            assert linear.startswith("**") == (percent >= distributed.WANTED)
            assert memory == f"{(of.timing.peak_bytes or 0) / GIB:.1f}"
    assert distributed._percent(94.97) == "94.97 %"


def test_a_network_that_the_gpus_did_not_train_is_an_error(tmp_path):
    folder, _ = _scaling(tmp_path, tuple(distributed.MODELS)[:1])
    with pytest.raises(ConfigError, match="no row 'dit_b2, ratio 100%, 1 process'"):
        distributed.scaling(folder)
