import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fullstride.measure import roofline as floor_module
from fullstride.measure.flops import count_flops
from fullstride.measure.roofline import IMPOSSIBLE, Ceilings, explained, marked, measure_ceilings, roofline_bound
from fullstride.measure.timing import Timing
from tests.measure.clocks import FakeClock

CEILINGS = Ceilings(flops=8e14, bytes=4e12, gemm="8192^3 bfloat16", copy=1, gemm_ms=[1.4], copy_ms=[0.5])


@pytest.mark.parametrize(
    ("flops", "moved", "arithmetic", "memory", "bound"),
    [
        (3.2e12, 4e9, 4.0, 1.0, "arithmetic"),
        (8e10, 1.2e10, 0.1, 3.0, "memory"),
        (0, 4_000_000_000, 0.0, 1.0, "memory"),
        (8e11, 4e9, 1.0, 1.0, "arithmetic"),
    ],
)
def test_the_floor_is_work_over_rate(flops, moved, arithmetic, memory, bound):
    found = roofline_bound(flops, moved, CEILINGS)
    assert found.arithmetic_ms == pytest.approx(arithmetic)
    assert found.memory_ms == pytest.approx(memory)
    assert found.ms == pytest.approx(max(arithmetic, memory))
    assert found.bound == bound
    assert found.to_dict() == {
        "arithmetic_ms": found.arithmetic_ms,
        "memory_ms": found.memory_ms,
        "ms": found.ms,
        "bound": bound,
    }


@pytest.mark.parametrize("over", [1.0, 1.001, 37.5])
def test_a_time_at_or_above_its_bound_is_a_multiple_of_it(over):
    bound = roofline_bound(1.6e12, 4e9, CEILINGS)  # 2 ms of arithmetic
    compared = bound.compare(Timing(9.0, (2.0 * over,) * 5, None))
    assert compared.ratio == pytest.approx(over)
    first, second = str(compared).splitlines()
    assert first.startswith(f"{2 * over:.{3 if over < 5 else 2}f} ms (p10 ")
    assert second == f"{over:.2f} x its roofline bound of 2.000 ms (arithmetic)"
    assert str(bound) == "roofline bound 2.000 ms (arithmetic)"


@pytest.mark.parametrize("over", [0.999, 0.5, 0.01])
def test_a_time_below_its_bound_is_said_to_be_noisy_with_what_to_do(over):
    bound = roofline_bound(8e10, 1.2e10, CEILINGS)  # 3 ms of memory
    said = str(bound.compare(Timing(9.0, (3.0 * over,) * 5, None)))
    assert f"{over:.2f} x its roofline bound of 3.000 ms (memory)" in said
    assert " ".join(said.split()).endswith(IMPOSSIBLE)
    assert "cannot be" in said
    assert "noisy" in said
    assert "more repeats" in said
    assert max(map(len, said.splitlines())) <= 80


def test_the_median_decides_what_is_below_a_bound():
    bound = roofline_bound(8e11, 0, CEILINGS)  # 1 ms
    assert IMPOSSIBLE[:20] not in str(bound.compare(Timing(9.0, (0.1, 0.2, 1.1, 1.2, 1.3), None)))
    assert IMPOSSIBLE[:20] in str(bound.compare(Timing(9.0, (0.8, 0.9, 0.9, 7.0, 8.0), None)))


def test_a_tables_cell_is_marked_below_the_bound_alone():
    assert (marked("0.93", 0.93), marked("1.00", 1.0), marked("5 %", 20.0)) == ("0.93 (!)", "1.00", "5 %")
    assert (explained([1.0, 3.0]), explained([])) == ("", "")
    assert explained([2.0, 0.99]) == f"(!) {IMPOSSIBLE}"


@pytest.mark.parametrize(
    ("flops", "moved", "shown"),
    [(7.9e14, 4.28e12, "790 TFLOP/s (x), 4.28 TB/s copy"), (6.13e10, 8.9e9, "61.3 GFLOP/s (x), 8.9 GB/s copy")],
)
def test_ceilings_have_units_of_their_size(flops, moved, shown):
    assert str(Ceilings(flops, moved, "x", 1, [], [])) == shown


@pytest.mark.parametrize(("m", "k", "n"), [(3, 5, 7), (1, 64, 2), (33, 17, 9)])
def test_a_matrix_product_takes_2_mkn(m, k, n):
    a, b = torch.randn(m, k), torch.randn(k, n)
    assert count_flops(lambda: a @ b) == 2 * m * k * n


@pytest.mark.parametrize(("stride", "padding", "groups"), [(1, 1, 1), (2, 1, 1), (1, 0, 3)])
def test_a_convolution_takes_2_products_a_tap(stride, padding, groups):
    b, c_in, c_out, h, w, k = 2, 6, 9, 11, 7, 3
    x, weight = torch.randn(b, c_in, h, w), torch.randn(c_out, c_in // groups, k, k)
    out_h, out_w = ((size + 2 * padding - k) // stride + 1 for size in (h, w))
    counted = count_flops(lambda: F.conv2d(x, weight, stride=stride, padding=padding, groups=groups))
    assert counted == 2 * b * c_out * out_h * out_w * (c_in // groups) * k * k


def test_the_backward_pass_counts_too():
    x, w = torch.randn(5, 7), torch.randn(7, 3, requires_grad=True)
    # x needs no gradient: one product forward, one backward.
    assert count_flops(lambda: (x @ w).sum().backward()) == 2 * (2 * 5 * 7 * 3)


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 3), (2, 6)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolutions_gradients_take_what_it_takes_each(stride, groups, transposed):
    layer = (torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d)(6, 12, 3, stride=stride, groups=groups)
    x = torch.randn(2, 6, 11, 7)
    forward = count_flops(lambda: layer(x))
    places = math.prod(x.shape[2:] if transposed else layer(x).shape[2:])
    assert forward == 2 * 2 * places * 6 * 12 // groups * 9
    assert count_flops(lambda: layer(x).sum().backward()) == 2 * forward
    x.requires_grad_()
    assert count_flops(lambda: layer(x).sum().backward()) == 3 * forward


def test_products_with_vectors_and_in_place_are_counted():
    a, b, v, c = torch.randn(5, 7), torch.randn(7, 3), torch.randn(7), torch.randn(5, 3)
    assert count_flops(lambda: (a @ v, torch.addmv(torch.zeros(5), a, v))) == 2 * (2 * 5 * 7)
    assert count_flops(lambda: torch.dot(v, v)) == 2 * 7
    assert count_flops(lambda: c.addmm_(a, b)) == 2 * 5 * 7 * 3
    assert count_flops(lambda: torch.zeros(4, 5, 3).baddbmm_(a.expand(4, 5, 7), b.expand(4, 7, 3))) == 4 * 2 * 5 * 7 * 3


def test_a_layer_in_eval_mode_takes_what_it_takes_in_training():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    x = torch.randn(3, 5, 8)
    # Queries, keys, values and the way out; two products of all pairs; the MLP.
    expected = 2 * 15 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 2 * 3 * 5 * 5 * 8
    for training in (True, False):
        with torch.no_grad():
            assert count_flops(lambda training=training: layer.train(training)(x)) == expected
    assert torch.backends.mha.get_fastpath_enabled()


def test_products_that_nothing_sees_are_refused():
    x = torch.randn(3, 5, 8)
    with pytest.raises(ValueError, match=r"aten\.mkldnn_rnn_layer multiplies matrices that cannot be counted"):
        count_flops(lambda: torch.nn.LSTM(8, 8)(x))
    with pytest.raises(ValueError, match=r"aten\._trilinear multiplies"):
        count_flops(lambda: torch.nn.Bilinear(8, 8, 4)(x, x))


@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_takes_two_products_of_every_pair_and_five_more_backward(masked):
    b, heads, queries, keys, size = 2, 3, 10, 14, 8
    q = torch.randn(b, heads, queries, size, requires_grad=True)
    k, v = (torch.randn(b, heads, keys, size, requires_grad=True) for _ in range(2))
    mask = torch.zeros(queries, keys) if masked else None
    product = 2 * b * heads * queries * keys * size
    assert count_flops(lambda: F.scaled_dot_product_attention(q, k, v, mask)) == 2 * product
    # The backward pass makes the weights again.
    assert count_flops(lambda: F.scaled_dot_product_attention(q, k, v, mask).sum().backward()) == (2 + 5) * product


def test_what_hides_its_operations_has_no_count():
    x = torch.randn(5, 7)
    with pytest.raises(ValueError, match="counted no operation; expected matrix products.* in an eager call"):
        count_flops(lambda: x + 1)


@pytest.mark.parametrize(("flops", "moved"), [(0, 0), (-1, 5), (5, -1), (math.nan, 1.0), (1.0, math.nan)])
def test_a_floor_of_nothing_is_refused(flops, moved):
    with pytest.raises(ValueError, match=f"flops is {flops} and moved {moved}; expected both >= 0"):
        roofline_bound(flops, moved, CEILINGS)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(floor_module.GEMM_SIZE, "cpu", 96)
    monkeypatch.setitem(floor_module.COPY_BYTES, "cpu", 1 << 16)


class TwoSpeeds(FakeClock):
    """Every timed call of the first function takes 2 ms, of the second half a millisecond."""

    def time(self, call: Callable[[], Any]) -> float:
        call()
        return 2.0 if self.resets <= 1 else 0.5

    resets = 0

    def reset_peak(self) -> None:
        self.resets += 1


def test_ceilings_are_the_rates_of_what_they_name(monkeypatch, small):
    monkeypatch.setattr(floor_module, "clock_for", lambda device: TwoSpeeds())
    found = measure_ceilings("cpu", "float64")
    assert found.flops == pytest.approx(2 * 96**3 / 2e-3)
    assert found.bytes == pytest.approx(2 * 65536 / 0.5e-3)
    assert (found.gemm, found.copy) == ("96^3 float64", 65536)
    assert set(found.gemm_ms) == {2.0}
    assert set(found.copy_ms) == {0.5}


def test_ceilings_are_measured_here(small):
    found = measure_ceilings("cpu")
    assert found.gemm == "96^3 float32"
    assert 0 < found.flops < 1e15
    assert 0 < found.bytes < 1e14
    assert len(found.gemm_ms) >= 10
    assert len(found.copy_ms) >= 10
