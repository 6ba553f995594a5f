import json

import numpy as np
import pytest
from scipy import stats

from fullstride.measure.pairs import Pair, measure_pair, median_interval, sign_test
from fullstride.measure.timing import Timing, TimingPlan
from tests.measure.clocks import FakeClock


def fixed(pairs: int, warmup: int = 0) -> TimingPlan:
    return TimingPlan(warmup=warmup, repeats=pairs, seconds=0.0)


def test_a_pair_takes_turns_in_abba_order():
    clock = FakeClock()
    measure_pair(clock.function("a", [1.0]), clock.function("b", [1.0]), clock, fixed(4, warmup=1))
    assert "".join(clock.calls) == "abab" + "abbaabba"


def test_an_odd_number_of_pairs_ends_on_a_whole_abba():
    clock = FakeClock()
    pair = measure_pair(clock.function("a", [1.0]), clock.function("b", [1.0]), clock, fixed(3))
    assert "".join(clock.calls) == "ab" + "abbaabba"
    assert len(pair.ratios) == 4


def test_the_time_of_both_ends_the_run():
    clock = FakeClock()
    a, b = clock.function("a", [10.0]), clock.function("b", [90.0])
    assert len(measure_pair(a, b, clock, TimingPlan(warmup=0, repeats=2, seconds=1.0)).ratios) == 10


def test_the_ratio_is_exact_and_pair_by_pair():
    clock = FakeClock()
    a = clock.function("a", [900.0, 2.0, 4.0, 8.0, 1.0])
    b = clock.function("b", [700.0, 3.0, 6.0, 16.0, 4.0])
    pair = measure_pair(a, b, clock, fixed(4))
    assert (pair.a.first_ms, pair.b.first_ms) == (900.0, 700.0)
    assert pair.a.samples_ms == (2.0, 4.0, 8.0, 1.0)
    assert pair.b.samples_ms == (3.0, 6.0, 16.0, 4.0)
    assert pair.ratios == (1.5, 1.5, 2.0, 4.0)
    # Not the ratio of the medians, which would be 5 / 3.
    assert pair.ratio == 1.75


def test_what_drifts_with_the_machine_cancels_in_the_ratio():
    clock = FakeClock()
    drift = [1.2**i for i in range(21)]
    pair = measure_pair(clock.function("a", drift), clock.function("b", [1.5 * d for d in drift]), clock, fixed(20))
    assert pair.ratios == pytest.approx([1.5] * 20)


def test_each_function_has_its_own_peak():
    clock = FakeClock()
    a, b = clock.function("a", [1.0], peaks=[9, 2, 3]), clock.function("b", [1.0], peaks=[9, 5, 4])
    pair = measure_pair(a, b, clock, fixed(2))
    assert (pair.a.peak_bytes, pair.b.peak_bytes) == (3, 5)


@pytest.mark.parametrize("n", [1, 2, 5, 6, 13, 200])
def test_the_sign_test_matches_scipy(n, seed):
    ratios = np.random.default_rng(seed).lognormal(0.2, 0.5, size=n)
    expected = stats.binomtest(int((ratios > 1).sum()), n).pvalue
    assert sign_test(tuple(ratios.tolist())) == pytest.approx(expected, rel=1e-9)
    # A ratio of 1 speaks for neither.
    assert sign_test((*ratios.tolist(), 1.0, 1.0)) == pytest.approx(expected, rel=1e-9)


def test_no_ratio_but_1_is_no_evidence():
    assert sign_test((1.0, 1.0)) == 1.0


@pytest.mark.parametrize("n", [6, 7, 8, 9, 20, 101, 1200])
def test_the_interval_of_the_median_matches_scipy(n, seed):
    samples = np.random.default_rng(seed).normal(size=n)
    expected = stats.quantile_test(samples, p=0.5).confidence_interval(0.95)
    assert median_interval(tuple(samples.tolist())) == (expected.low, expected.high)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_too_few_samples_have_no_interval(n):
    assert median_interval(tuple(float(i) for i in range(n))) is None


def test_the_interval_holds_the_median_as_often_as_it_says():
    draws = np.random.default_rng(0).exponential(size=(2000, 15))
    found = np.array([median_interval(tuple(row.tolist())) for row in draws])
    held = ((found[:, 0] <= np.log(2)) & (np.log(2) <= found[:, 1])).mean()
    # 0.9648 at 15 samples, known within 3 standard errors of 0.004.
    assert abs(held - 0.9648) < 0.0124


@pytest.mark.parametrize(("factor", "word"), [(0.5, "faster"), (1.5, "slower")])
def test_a_printed_pair_is_a_sentence_and_a_table(factor, word, seed):
    times = np.random.default_rng(seed).uniform(1.0, 3.0, size=12)
    b = times * factor * np.linspace(0.9, 1.1, 12)
    pair = Pair(Timing(77.0, tuple(times.tolist()), None), Timing(88.0, tuple(b.tolist()), None))
    said, table = str(pair).split("\n\n")
    low, high = median_interval(pair.ratios) or (0.0, 0.0)
    assert said.startswith(f"b is {word}: it takes {np.median(b / times):.3f} x the time of a,")
    assert f"95 % interval {low:.3f} to {high:.3f} (12 pairs, sign test: p = 0.00049)." in said
    header, first, second, ratios = table.splitlines()
    assert header.split() == ["median", "p10", "p90", "first"]
    assert first.split() == ["a,", "ms", *(f"{np.quantile(times, q):.3f}" for q in (0.5, 0.1, 0.9)), "77.00"]
    assert second.split()[-1] == "88.00"
    assert ratios.split() == ["b", "/", "a", *(f"{np.quantile(b / times, q):.3f}" for q in (0.5, 0.1, 0.9))]
    assert max(map(len, str(pair).splitlines())) <= 80
    assert {len(line) for line in (header, first, second)} == {len(header)}


@pytest.mark.parametrize("ratios", [(1.2,) * 5, (1.1, 0.9) * 8])
def test_a_pair_that_shows_nothing_says_so(ratios):
    said = str(Pair(Timing(1.0, (1.0,) * len(ratios), None), Timing(1.0, ratios, None)))
    assert said.startswith(f"{len(ratios)} pairs show no difference (sign test: p = ")


def test_a_pair_is_kept_with_its_spread_and_raw_ratios():
    a = Timing(1.0, (1.0,) * 6, None)
    b = Timing(1.0, (1.1, 1.2, 1.3, 1.4, 1.5, 1.6), None)
    kept = Pair(a, b).to_dict()
    assert json.loads(json.dumps(kept)) == kept
    assert kept["ratios"] == [1.1, 1.2, 1.3, 1.4, 1.5, 1.6]
    assert kept["interval"] == [1.1, 1.6]
    assert kept["ratio"] == pytest.approx(1.35)
    assert (kept["p10"], kept["p90"]) == (pytest.approx(1.15), pytest.approx(1.55))
    assert kept["sign_test"] == 2 / 2**6
    assert Pair(a, a).to_dict()["ratio"] == 1.0
    assert Pair(Timing(1.0, (2.0,), None), Timing(1.0, (1.0,), None)).to_dict()["interval"] is None
