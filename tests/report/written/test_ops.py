"""Tables about ops and steps: each cell is the file's number, what misses its target or did not run says so."""

import json
import random
from pathlib import Path

import pytest

from fullstride.bench.floor import Ceilings
from fullstride.bench.results import CaseResult, write_result
from fullstride.errors import ConfigError
from fullstride.report.markdown import the_experiment
from fullstride.report.reading import Folder, Measurement, read_folder
from fullstride.report.written import derivatives, equinox, language
from tests.report.made import row

SHAPE, OTHER = "long64 B1 H2 L64 D64", "table B1 H1 L128 D64"
KINDS = ("forward", "detached", "through")
PEERS = {
    "forward": ("ours", "vanilla"),
    "detached": ("ours", "cudnn", "flash", "vanilla"),
    "through": ("ours", "vanilla"),
}


def _folder(path: Path, case: str, rows: list, device: str = "cuda", **conditions) -> Folder:
    machine = {"cpu": "a CPU", "cores": 2, "gpu": None if device == "cpu" else {"name": "a GPU"}}
    ceilings = Ceilings(1e12, 1e12, "a product", 1, [1.0], [1.0])
    write_result(CaseResult(case, device, conditions, {}, ceilings, rows, machine), path)
    return read_folder(path)


def _cells(table, first: str) -> list[str]:
    (line,) = [line for line in str(table).splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def _op(kinds: dict[str, tuple[str, ...]], shapes: tuple[str, ...]) -> list:
    return [
        row(f"{shape} {kind}, {who}", shape=shape, kind=kind, who=who, gflop=random.uniform(1, 9), bytes=1 << 25)
        for shape in shapes
        for kind, whos in kinds.items()
        for who in whos
    ]


def test_attention_stands_beside_its_peers_and_what_did_not_run_says_why(tmp_path):
    rows = [r for r in _op(PEERS, (SHAPE, OTHER)) if r.name != f"{SHAPE} through, vanilla"]
    left = [{"shape": SHAPE, "kind": "through", "who": "vanilla", "why": "no memory"}]
    conditions = {"precision": "bf16", "at": "all", "left_out": left}
    table = derivatives.attention(_folder(tmp_path, "jvp-attention", rows, **conditions))
    found = _cells(table, "B1 H2 L64 D64")
    assert found[-1] == "no memory"
    assert OTHER.partition(" ")[2] not in str(table)
    times = {r.name: r.timing.median_ms for r in rows}
    ours = next(r for r in rows if r.name == f"{SHAPE} forward, ours")
    assert f"({ours.extra['gflop'] / ours.timing.median_ms:.0f} TFLOP/s)" in found[1]
    for place, who in ((4, "cudnn"), (5, "flash"), (6, "vanilla")):
        assert float(found[place].replace(",", "")) == pytest.approx(times[f"{SHAPE} detached, {who}"], rel=1e-3)


def test_a_norm_below_its_target_is_bold_and_one_above_is_not(tmp_path):
    rows = _op(dict.fromkeys(KINDS, ("ours", "eager")), ("group_norm 1x1",))
    table = derivatives.norms(_folder(tmp_path, "jvp-norms", rows, precision="bf16", at="all", left_out=[]))
    found = _cells(table, "group_norm 1x1")
    for kind, cell in zip(KINDS, found[1:4], strict=True):
        ours, eager = (next(r for r in rows if r.name.endswith(f"{kind}, {who}")) for who in ("ours", "eager"))
        percent = 100 * ours.floor.ms / ours.timing.median_ms
        assert cell.startswith("**") == (percent < derivatives.LEAST[kind])
        assert float(cell.strip("*")) == pytest.approx(percent, abs=0.5)
        over = found[4].split(" / ")[KINDS.index(kind)].replace(",", "")
        assert float(over) == pytest.approx(eager.timing.median_ms / ours.timing.median_ms, rel=0.05)


def test_a_share_just_below_its_target_is_not_rounded_up_to_it():
    def at(share: float) -> Measurement:
        return Measurement("x", 1.0, 1.0, 1.0, share, "memory", 1 / share, {})

    assert derivatives._share(at(0.797), 80.0) == "**79.7**"
    assert derivatives._share(at(0.803), 80.0) == "80"


def _dispatch(path: Path) -> tuple[Folder, dict[str, dict[str, float]]]:
    times: dict[str, dict[str, float]] = {}
    for device in equinox.MACHINES:
        spread = {"host": {"median_ms": 1.0}, "over_flat": {"ratio": 2.0}, "arrays": 7}
        rows = [row(name, **spread) for name in equinox.WAYS] + [row("a part")]
        passed = device == "cpu"
        target = {"name": "a", "against": "b", "limit": 0.5, "ratio": 0.123, "p10": 0.1, "p90": 0.2, "passed": passed}
        conditions = {"model": "base", "section": "host", "targets": [target]}
        _folder(path, "train-step", rows, device, **conditions)
        times[device] = {r.name: r.timing.median_ms for r in rows}
    return read_folder(path), times


def test_calls_of_a_step_on_both_machines_and_what_was_asked_of_them(tmp_path):
    folder, times = _dispatch(tmp_path)
    assert len(folder.results) == 2
    for device, of in times.items():
        found = _cells(equinox.host(device, folder), "TrainStep")
        assert float(found[1]) == pytest.approx(of["TrainStep"], abs=1e-3)
        assert found[3:] == ["2.00", "1.00"]
    part = [float(cell) for cell in _cells(equinox.parts(folder), "a part")[1:]]
    assert part == pytest.approx([of["a part"] for of in times.values()], abs=1e-3)
    asked = _cells(equinox.targets(folder), "a / b")
    assert asked == ["a / b", "0.5", "0.123 (0.100-0.200)", "0.123 (0.100-0.200), **missed**"]


def _over(low: float, high: float) -> dict:
    return {"ratio": (low + high) / 2, "interval": [low, high]}


def test_a_whole_step_has_its_interval_and_the_bare_executable_none(tmp_path):
    def step(way: str, low: float, high: float):
        free = {"median_ms": 12.345, "first_ms": 6_700.0}
        return row(f"{way}, sdpa", over_bare=_over(low, high), free_over_bare=_over(low, high), free=free)

    rows = [step("bare executable", 1.0, 1.0), step("filter_jit", 1.2, 1.4)]
    conditions = {"model": "base", "section": "step", "mode": "sdpa"}
    table = equinox.gpu_steps("sdpa", _folder(tmp_path, "train-step", rows, **conditions))
    assert _cells(table, "bare executable")[2:] == ["1", "12.35", "1", "6.7"]
    assert _cells(table, "filter_jit")[2] == "1.300 (1.200-1.400)"


def test_a_step_that_the_experiment_did_not_time_is_an_error(tmp_path):
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    data = json.loads((results / "experiment-bert--gpu--nvidia-h200.json").read_text())
    (tmp_path / "experiment-bert--gpu--other.json").write_text(json.dumps(data))
    source = the_experiment(read_folder(tmp_path), "experiment-bert--gpu")
    ways = {(r["labels"]["model"], r["labels"]["way"]): r for r in data["parts"][1]["rows"]}
    expected = ways["base", "filter_jit"]["metrics"]["step ms"]["mean"]
    assert language.step_ms(source, "base", "filter_jit") == expected
    with pytest.raises(ConfigError, match="no step of base by 'magic'"):
        language.step_ms(source, "base", "magic")
