import pytest

from fullstride.measure.text import aligned, milliseconds
from fullstride.measure.timing import Timing


@pytest.mark.parametrize(
    ("value", "shown"),
    [(12345.6, "12346"), (1234.4, "1234"), (98.765, "98.77"), (1.0, "1.000"), (0.11, "0.110"), (0.00052, "0.000520")],
)
def test_milliseconds_keep_their_digits_at_every_size(value, shown):
    assert milliseconds(value) == shown


def test_columns_are_aligned():
    lines = aligned([("", "a", "long name"), ("first", "1.25", ""), ("b", "100", "7")]).splitlines()
    assert lines == ["          a  long name", "first  1.25", "b       100          7"]


def test_a_timing_is_printed_as_its_median_and_spread():
    timing = Timing(500.0, tuple(float(i) for i in range(1, 12)), None)
    assert str(timing) == "6.000 ms (p10 2.000, p90 10.00; 11 calls)"
    assert "samples_ms" in repr(timing)
