import contextlib
import gc
import os
import signal
import sys
import time

import pytest

from fullstride.errors import PeerError, Preempted
from fullstride.process import signals as stop_module
from fullstride.process.signals import SIGNALS, StopSignal, leaving_on_sigterm, run_or_stop


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_collected_and_the_handler_before_comes_back(number):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert stop.signal is None
        signal.raise_signal(number)
        assert stop.signal == number
    assert signal.getsignal(number) is before


def test_where_nothing_changes_a_signal_ends_the_work_at_once_and_only_it():
    reached = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception:  # as a library that tries another way
            reached.append("swallowed")
        reached.append("inside")

    with StopSignal() as stop:
        assert stop.unless_stopped(lambda: 7) == 7
        assert stop.unless_stopped(work) is None
        assert stop.unless_stopped(lambda: reached.append("too late")) is None
        signal.raise_signal(signal.SIGINT)
        reached.append("later")
    assert reached == ["later"]
    assert stop.signal == signal.SIGINT


def test_a_mistake_in_that_work_is_not_a_signal():
    with StopSignal() as stop:
        with pytest.raises(ZeroDivisionError):
            stop.unless_stopped(lambda: 1 / 0)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM


def test_a_second_ctrl_c_is_died_of_unless_it_is_the_echo_of_the_first(monkeypatch, capfd):
    now = [0.0]
    monkeypatch.setattr(stop_module.time, "monotonic", lambda: now[0])
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        now[0] = 0.5
        signal.raise_signal(signal.SIGINT)
        now[0] = 5.0
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt, match="ended without saving"):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "SIGINT: stopping as soon as possible; Ctrl-C again ends without saving\n"


def test_sigterm_with_nothing_to_save_ends_with_0_and_the_handler_before_comes_back(capfd):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, leaving_on_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 0
    assert capfd.readouterr().err == "stopped with nothing to save\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_a_library_replaced_is_put_back():
    with StopSignal() as stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal is None
        stop.arm()
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM


class Destroyed:
    """A signal comes while it is destroyed, where Python drops what is raised."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def _destroy():
    Destroyed()


@pytest.fixture(params=[gc.collect, _destroy], ids=["callback", "destructor"])
def met(request, monkeypatch):
    """Signal that comes where it cannot end anything, and the exceptions that Python has dropped."""
    dropped, came = [], []

    def called(phase, _):
        if request.param is gc.collect and phase == "stop" and not came:
            came.append(phase)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(stop_module, "LOST", 0.2)
    monkeypatch.setattr(sys, "unraisablehook", lambda found: dropped.append(found.exc_type))
    gc.callbacks.append(called)
    yield request.param, dropped
    gc.callbacks.remove(called)
    # In a callback nothing is raised, of which Python would tell.
    assert bool(dropped) == (request.param is _destroy)


def test_a_signal_where_python_drops_what_is_raised_ends_the_work_all_the_same(met):
    def slow():
        met[0]()
        time.sleep(60)

    begun = time.monotonic()
    with StopSignal() as stop:
        assert stop.unless_stopped(slow) is None
        time.sleep(0.5)  # nothing comes later
    assert stop.signal == signal.SIGTERM
    assert time.monotonic() - begun < 30


def test_a_signal_where_python_drops_what_is_raised_ends_the_process_all_the_same(met, capfd):
    def slow():
        met[0]()
        time.sleep(60)

    begun = time.monotonic()
    with pytest.raises(SystemExit) as left, leaving_on_sigterm():
        slow()
    assert left.value.code == 0
    assert "stopped with nothing to save" in capfd.readouterr().err
    assert time.monotonic() - begun < 30


def test_a_signal_lost_before_a_run_collects_them_ends_that_run(met):
    begun = time.monotonic()
    with leaving_on_sigterm():
        met[0]()
        with StopSignal() as stop:
            assert stop.unless_stopped(lambda: time.sleep(60)) is None
            assert stop.signal == signal.SIGTERM
        time.sleep(0.5)  # nothing comes later
    assert time.monotonic() - begun < 30


def test_what_was_sent_again_for_one_command_does_not_end_the_next(monkeypatch):
    monkeypatch.setattr(stop_module, "LOST", 0.2)
    for _ in range(2):
        with pytest.raises(SystemExit), leaving_on_sigterm():
            signal.raise_signal(signal.SIGTERM)
    with leaving_on_sigterm():
        time.sleep(0.5)


def ended_by(error: type[BaseException]) -> None:
    """A run that such an error ends, and that is told to stop on its way out."""
    try:
        with StopSignal():
            raise error("of this run")
    finally:
        signal.raise_signal(signal.SIGTERM)


def test_a_sigterm_while_an_error_ends_a_run_hides_neither_it_nor_that_steps_are_lost(capfd):
    """torchrun stops the others when one process was killed, while they fail of that themselves."""
    with pytest.raises(PeerError, match="of this run"), leaving_on_sigterm():
        ended_by(PeerError)
    assert capfd.readouterr().err == "SIGTERM: already ending after an error\n"


@pytest.mark.parametrize("end", [Preempted, KeyboardInterrupt])
def test_a_sigterm_after_a_run_has_saved_ends_with_0(end):
    with pytest.raises(SystemExit) as left, leaving_on_sigterm():
        ended_by(end)
    assert left.value.code == 0


def test_a_sigterm_after_an_error_that_was_dealt_with_ends_what_follows():
    def all_runs() -> None:
        with contextlib.suppress(ZeroDivisionError), StopSignal():
            raise ZeroDivisionError
        with StopSignal():
            pass
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit), leaving_on_sigterm():
        all_runs()


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)])
def test_what_changes_nothing_is_ended_at_once(number, raised):
    went_on = []

    def work() -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)
        went_on.append(True)

    assert run_or_stop(lambda: 7, "a sum") == 7
    with pytest.raises(raised, match="stopped in a sum; to begin it again, run the same command"):
        run_or_stop(work, "a sum")
    assert not went_on
