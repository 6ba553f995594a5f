import signal

import pytest

from fullstride.meanflow.stop import SIGNALS, Stop, StopNow


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_collected_and_the_handler_before_comes_back(number):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert stop.signal is None
        signal.raise_signal(number)
        assert stop.signal == number
    assert signal.getsignal(number) is before


def test_where_nothing_changes_a_signal_interrupts_at_once():
    with Stop() as stop:
        stop.at_once = True
        with pytest.raises(StopNow):
            signal.raise_signal(signal.SIGTERM)
    assert stop.signal == signal.SIGTERM


def test_a_handler_that_a_library_replaced_is_put_back():
    with Stop() as stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal is None
        stop.arm()
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
