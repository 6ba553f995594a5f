import signal

import pytest

from fullstride.meanflow.stop import SIGNALS, Stop


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_collected_and_the_handler_before_comes_back(number):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert stop.signal is None
        signal.raise_signal(number)
        assert stop.signal == number
    assert signal.getsignal(number) is before


def test_where_nothing_changes_a_signal_ends_the_block_and_only_it():
    reached = []
    with Stop() as stop:
        with stop.interrupting():
            signal.raise_signal(signal.SIGTERM)
            reached.append("inside")
        reached.append("after")
        signal.raise_signal(signal.SIGINT)
        reached.append("later")
    assert reached == ["after", "later"]
    assert stop.signal == signal.SIGINT


def test_a_handler_that_a_library_replaced_is_put_back():
    with Stop() as stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal is None
        stop.arm()
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
