import gc

import pytest

from fullstride.process.gc_paused import gc_paused


def _fails() -> None:
    with gc_paused():
        assert not gc.isenabled()
        raise RuntimeError("capture")


def test_the_collector_waits_and_goes_on_after_an_error():
    with pytest.raises(RuntimeError, match="capture"):
        _fails()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
