import itertools
import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import Any

import pytest

from benchmarks.cases.meanflow import scaling as bench_scaling
from benchmarks.cases.meanflow import scaling_steps as bench_scaling_steps
from benchmarks.cases.meanflow.options import ScalingOptions as Options
from benchmarks.cases.meanflow.options import counts
from benchmarks.cases.meanflow.scaling import run
from benchmarks.cases.meanflow.scaling_sets import Found, step_options
from benchmarks.cases.meanflow.scaling_steps import Measured
from benchmarks.cases.meanflow.step_setup import make_setup
from benchmarks.harness.process_pool import Team, Worker
from benchmarks.harness.results import read_result
from fullstride.errors import ConfigError
from fullstride.measure.gate import GateError
from fullstride.step.torch import SINGLE
from fullstride.step.torch.runners.graph import WARM
from tests.benchmarks.cases.meanflow import quick_bench

quick = quick_bench.quick


@pytest.mark.thorough
def test_two_processes_beside_one_in_one_run(quick, tmp_path, capsys):
    chosen: dict[str, Any] = {
        "device": "cpu",
        "precision": "fp32",
        "backend": "eager",
        "models": ("dit_tiny",),
        "ratios": (0.5,),
    }
    result = read_result(run(Options(**chosen, kinds=("fsdp",), batch_size=2, averages=1), tmp_path))
    alone, shared = result["rows"]
    assert (alone["extra"]["processes"], shared["extra"]["processes"]) == (1, 2)
    assert alone["extra"]["efficiency"] == 1
    times = alone["timing"]["median_ms"], shared["timing"]["median_ms"]
    assert shared["extra"]["efficiency"] == pytest.approx(times[0] / times[1])
    assert shared["extra"]["buckets"] >= 1
    assert shared["extra"]["transfer_ms"] > 0
    assert len(shared["extra"]["own_median_ms"]) == 2
    assert 0 <= result["gate"]["dit_tiny, ratio 50%, fsdp, gloo"] < 1e-4
    assert result["conditions"]["left_out"] == []
    assert "dit_tiny, ratio 50%, 2 processes, fsdp, gloo" in capsys.readouterr().out


class Silent:
    """Team without processes."""

    def tell(self, word):
        ceilings, _ = word
        assert ceilings.bytes > 0


@pytest.fixture
def no_processes(monkeypatch):
    """Replace the measured processes by given results."""

    @contextmanager
    def started(jobs, options, size):
        yield [Silent() for _ in jobs]

    def given(find: Callable[[list[Found], Callable[[Found], None]], None]) -> None:
        monkeypatch.setattr(bench_scaling, "run_sets", lambda _, found, __, keep: find(found, keep))

    monkeypatch.setattr(bench_scaling, "started", started)
    return given


TWO: dict[str, Any] = {"models": ("dit_tiny",), "ratios": (1.0, 0.0), "batch_size": 3}


def test_rows_of_shares_have_a_share_of_the_floor(quick, no_processes, tmp_path):
    """Check that a rise in time is an efficiency, and that a failure is written and raised."""

    def measured(found, keep):
        rows = [Measured("none", 1, (10.0, 12.0, 11.0), 1.0, None), Measured("ddp", 2, (12.5, 13.75, 15.0), 1.0, None)]
        rows.append(Measured("fsdp", 2, (11.0,), 1.0, 2**30, {"transfer_ms": 0.5}))
        found[0].rows, found[0].errors, found[0].ready_s, found[0].why = rows, {"ddp": 0.25}, 9.5, ""
        found[1].why = "it broke"
        keep(found[0])

    no_processes(measured)
    options = Options("cpu", "fp32", "eager", **TWO)
    with pytest.raises(GateError, match="dit_tiny, ratio 0%: it broke"):
        run(options, tmp_path)
    assert not (tmp_path / "unfinished").exists()
    (path,) = tmp_path.glob("meanflow-scaling--dit_tiny--fp32--eager--*.json")
    result = read_result(path)
    alone, ddp, fsdp = result["rows"]
    assert ddp["extra"]["efficiency"] == pytest.approx(11 / 13.75)
    assert alone["floor"] == ddp["floor"]
    assert fsdp["floor"]["memory_ms"] == pytest.approx(alone["floor"]["memory_ms"] * (3 + 14 / 2) / 17)
    assert result["conditions"]["left_out"] == [{"name": "dit_tiny, ratio 0%", "why": "it broke"}]
    assert result["conditions"]["ready_seconds"] == {"dit_tiny, ratio 100%": 9.5}


def test_a_bench_that_is_cut_short_has_written_every_row(quick, no_processes, tmp_path, capsys):
    class CutError(Exception):
        pass

    def cut(found, keep):
        for number, row in enumerate([Measured("none", 1, (8.0,), 1.0, None), Measured("ddp", 2, (10.0,), 1.0, None)]):
            found[0].rows.append(row)
            keep(found[0])
            (path,) = (tmp_path / "unfinished").glob("meanflow-scaling--*.json")
            assert len(read_result(path)["rows"]) == number + 1
        raise CutError

    no_processes(cut)
    with pytest.raises(CutError):
        run(Options("cpu", "fp32", "eager", **TWO), tmp_path)
    (path,) = (tmp_path / "unfinished").glob("meanflow-scaling--*.json")
    assert not list(tmp_path.glob("*.json"))  # a whole result would still be there
    left_out = read_result(path)["conditions"]["left_out"]
    assert left_out == [{"name": f"dit_tiny, ratio {n}%", "why": "the bench was ended before"} for n in (100, 0)]
    assert "dit_tiny, ratio 100%, 2 processes, ddp: 10.00 ms, 80.0% efficient" in capsys.readouterr().err


def test_a_bench_whose_time_ends_leaves_one_file(quick, no_processes, tmp_path):
    def ended(found, keep):
        found[0].rows, found[0].ready_s = [Measured("none", 1, (8.0,), 1.0, None)], 1.0
        keep(found[0])
        found[0].why, found[1].why = "", "no time"
        keep(found[0])
        assert len(list((tmp_path / "unfinished").iterdir())) == 1

    no_processes(ended)
    path = run(Options("cpu", "fp32", "eager", **TWO), tmp_path)
    assert "--cut-short--" in path.name
    assert list(tmp_path.iterdir()) == [path]


def test_only_what_is_named_is_measured(quick, no_processes, tmp_path):
    names = []
    no_processes(lambda found, _: names.extend(each.job.name for each in found))
    with pytest.raises(GateError):
        run(Options("cpu", "fp32", "eager", **TWO, only=("ratio 0%",)), tmp_path)
    assert names == ["dit_tiny, ratio 0%"]
    with pytest.raises(ConfigError, match="expected a part of one of dit_tiny, ratio 100%; dit_tiny, ratio 0%"):
        run(Options("cpu", "fp32", "eager", **TWO, only=("ratio 50%",)), tmp_path)


class Saying(Worker):
    """Worker without a process, that sends given messages."""

    def __init__(self, *said: Any):
        self.line, self.theirs = Pipe()
        for each in said:
            self.theirs.send(each)

    def end(self) -> None:
        """Do nothing: no process runs."""


def test_a_team_tells_what_came_first_and_why_there_is_no_more():
    lost = "PeerError: another process of this run has ended"
    first, second = Saying({"ddp": 0.5}, lost), Saying("StepError: wrong")
    taken: list[Any] = []
    broken = Team([first, second])
    assert not broken.hear("ready", time.monotonic() + 60, taken.append)
    assert (broken.why, taken) == ("StepError: wrong", [{"ddp": 0.5}])
    heard, silent = Saying("ready"), Saying()
    late = Team([heard, silent])
    assert not late.hear("ready", time.monotonic() + 0.05, taken.append)
    assert late.why == "no time"
    gone = Saying()
    gone.theirs.close()
    dead = Team([gone])
    assert not dead.hear("ready", time.monotonic() + 60, taken.append)
    assert dead.why == "a process of it has ended"


def test_a_compiled_step_is_held_against_what_is_not_compiled_and_compiled_once(quick, monkeypatch):
    """Check that two kinds of steps and their checks share the first compilation."""
    compiled, plain = [], []

    def counted(loss, telling):
        assert telling
        compiled.append(loss)

        def run(model, drawn):
            plain.append(None)
            return loss(model, drawn)

        return run

    monkeypatch.setattr(bench_scaling_steps, "compiled_loss", counted)
    options = Options("cpu", "fp32", "compile", models=("dit_tiny",), batch_size=2, averages=1)
    setup = make_setup(step_options(options, "dit_tiny"))
    steps = bench_scaling_steps.Steps(options, setup, setup.loss(0.5, split="shared"), SINGLE)
    errors = steps.compile(((1, SINGLE),))
    assert set(errors) == {"ddp, none", "fsdp, none"}
    assert max(errors.values()) < 1e-5
    assert len(compiled) == 1
    # One that compiles, and of each kind those until one would be recorded; references are none of them.
    assert len(plain) == 1 + 2 * (WARM + 1)


@pytest.mark.parametrize("after", [0, 10])
def test_numbers_that_are_not_finite_are_an_error_with_a_name(quick, monkeypatch, after):
    """Check the baseline and the final result for non-finite numbers, in steps that are otherwise only timed."""
    options = Options("cpu", "fp32", "eager", models=("dit_tiny",), batch_size=2, averages=1, kinds=("ddp",))
    setup = make_setup(step_options(options, "dit_tiny"))
    steps = bench_scaling_steps.Steps(options, setup, setup.loss(0.5, split="shared"), SINGLE)
    calls = itertools.count()
    plain = steps._plain
    steps._run = steps._plain = lambda model, drawn: plain(model, drawn) * (math.nan if next(calls) >= after else 1.0)
    if after == 0:
        with pytest.raises(GateError, match="ddp, none, backend=eager, .*: eager fp32's loss or gradients are not"):
            steps.compile(((1, SINGLE),))
    else:
        with pytest.raises(GateError, match="none, none, 1 processes: last losses .nan"):
            list(steps.measure(()))


def test_numbers_of_processes_and_impossible_requests():
    assert counts(1) == (1,)
    assert counts(4) == (1, 2, 4)
    assert counts(6) == (1, 2, 4, 6)
    wrong: list[dict[str, Any]] = [{"kinds": ("dpp",)}, {"models": ("unett",)}, {"ratios": (1.5,)}, {"averages": 9}]
    for changes in wrong:
        with pytest.raises(ConfigError, match="expected"):
            Options(**changes)
