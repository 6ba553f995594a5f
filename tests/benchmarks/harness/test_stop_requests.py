"""Tests of a stop signal to a benchmark: measured rows are written."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks.harness.budget import ENDED, NO_TIME, Budget, asked_to_end, ending_early
from fullstride.errors import Preempted
from fullstride.measure.gate import GateError
from fullstride.process import signals as stop

ENDS = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Preempted)]


def send(number: int) -> None:
    signal.raise_signal(number)  # to this thread: a process may be heard of it by another one, and later


@pytest.fixture(autouse=True)
def _handlers():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert not asked_to_end()


def ended(act: Callable[[], None]) -> None:
    """Run a benchmark's work, as the commands do."""
    with ending_early():
        act()


@pytest.mark.parametrize(("number", "raised"), ENDS)
def test_the_first_signal_spends_every_budget_and_ends_the_block_at_its_end(capfd, number, raised):
    budget, done = Budget.of(1000.0), []

    def work() -> None:
        assert not budget.spent
        send(number)
        assert budget.spent
        assert Budget.of(1000.0).spent
        done.append("written")

    with pytest.raises(raised, match="measured rows are written"):
        ended(work)
    assert done == ["written"]
    assert not budget.spent
    assert "nothing more is begun" in capfd.readouterr().err


def test_without_one_nothing_is_raised():
    spent = list[bool]()
    ended(lambda: spent.append(Budget.of(1000.0).spent))
    assert spent == [False]


def test_what_goes_wrong_meanwhile_is_told_instead():
    def work() -> None:
        send(signal.SIGTERM)
        raise GateError("a step is wrong")

    with pytest.raises(GateError, match="a step is wrong"):
        ended(work)


def test_another_one_ends_at_once_unless_a_wrapper_has_passed_it_on(monkeypatch):
    done = list[str]()

    def work() -> None:
        send(signal.SIGINT)
        send(signal.SIGINT)
        done.append("went on")
        monkeypatch.setattr(stop, "ANOTHER", 0.0)
        send(signal.SIGINT)
        done.append("went on again")

    with pytest.raises(KeyboardInterrupt, match=ENDED):
        ended(work)
    assert done == ["went on"]


def test_a_handler_that_a_compiler_has_put_there_is_replaced():
    asked = list[bool]()

    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        asked.append(asked_to_end())
        send(signal.SIGTERM)
        asked.append(asked_to_end())

    with pytest.raises(Preempted):
        ended(work)
    assert asked == [False, True]


@pytest.mark.thorough
def test_a_stopped_bench_writes_what_it_has_and_names_the_rest(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "jvp-norms", "--device", "cpu", "--precision", "fp32"]
    asked = [*command, "--shapes", "models", "--out", str(tmp_path)]
    with subprocess.Popen(asked, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        for line in bench.stderr:
            if line.startswith("timing"):
                break
        bench.send_signal(signal.SIGTERM)
        _, told = bench.communicate(timeout=120)
    assert bench.returncode == 0, told
    assert "measured rows are written" in told.splitlines()[-1]
    (path,) = tmp_path.glob("*.json")
    assert "cut-short" in path.name
    result = json.loads(path.read_text())
    assert result["rows"]
    assert NO_TIME in {entry["why"] for entry in result["conditions"]["left_out"]}
