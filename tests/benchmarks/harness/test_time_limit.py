import math
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.harness.time_limit import Limit
from fullstride.errors import Preempted
from fullstride.process.signals import LOST, StopSignal


def test_the_end_of_a_time_is_for_saving():
    long, short = Limit.of(600.0), Limit.of(50.0)
    assert (long.reserve, short.reserve) == (20.0, 5.0)
    assert 579 < long.left <= 580
    assert long.fits(570.0)
    assert not long.fits(581.0)
    assert not Limit.of(0.0).fits(0.0)


def test_a_commands_time_begins_with_its_process():
    code = "import sys, time; time.sleep(0.5); from benchmarks.harness.time_limit import Limit; "
    code += "sys.argv = ['/some/benchmarks/__main__.py']; print(Limit.of_command(100.0).spent)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.5 <= float(done.stdout) < 60
    assert Limit.of_command(100.0).spent < 0.5  # of another program


def test_without_a_limit_everything_fits():
    limit = Limit()
    assert limit.fits(1e9)
    assert math.isinf(Limit.of(math.inf).left)
    with limit.kept():
        pass


def test_a_process_tells_itself_to_end_in_time(capfd):
    with StopSignal() as stop, Limit.of(0.5).kept():
        end = time.monotonic() + 10
        while stop.signal is None and time.monotonic() < end:
            time.sleep(0.01)
    assert stop.signal == signal.SIGTERM
    assert "--limit 0.5: 0 s are left for saving" in capfd.readouterr().err


def test_what_is_done_in_time_is_told_nothing():
    with StopSignal() as stop:
        with Limit.of(0.3).kept():
            pass
        time.sleep(0.4)
    assert stop.signal is None


@pytest.mark.parametrize("is_over", [False, True])
def test_who_stopped_is_told_apart(monkeypatch, is_over):
    limit, over = Limit.of(1000.0), []
    monkeypatch.setattr(Limit, "left", property(lambda limit: -1.0 if over else 1000.0))

    def stopped():
        over.extend([True] * is_over)
        raise Preempted("saved")

    def told():  # outside of whatever has something to save
        over.extend([True] * is_over)
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("went on")

    for act, raised, text in (
        (stopped, Preempted, "saved"),
        (told, SystemExit, "--limit 1000: stopped; the same command goes on"),
    ):
        over.clear()
        assert limit.cuts(lambda: None) is None
        if is_over:
            assert str(limit.cuts(act)) == text
        else:
            with pytest.raises(raised):
                limit.cuts(act)


def test_what_comes_after_the_work_that_was_cut_is_let_finish():
    limit = Limit.of(0.5)
    assert isinstance(limit.cuts(lambda: time.sleep(30)), Preempted)
    time.sleep(LOST + 0.5)  # a signal that has found a destructor is sent again


def test_what_comes_after_work_that_was_done_in_time_is_let_finish():
    assert Limit.of(0.5).cuts(lambda: None) is None
    time.sleep(0.6)
