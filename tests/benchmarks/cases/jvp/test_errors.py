import pytest
import torch

from benchmarks.cases.jvp.common import error_beside_eager, merged
from fullstride.measure.gate import GateError


def test_errors_stand_beside_eagers():
    g = torch.Generator().manual_seed(0)
    exact = torch.randn(50, generator=g, dtype=torch.float64)
    near = exact * (1 + 1e-6)
    found = error_beside_eager("o", near.float(), exact, (exact * (1 + 4e-6)).float())
    assert found["ours"] == pytest.approx(1e-6, rel=0.1)
    assert found["eager"] == pytest.approx(4e-6, rel=0.1)
    assert set(error_beside_eager("o", exact.float(), exact, None)) == {"ours"}
    with pytest.raises(GateError, match="o: relative error 1.0.e-06, expected at most 4.8e-07; not timed"):
        error_beside_eager("o", near.float(), exact, None)
    with pytest.raises(GateError, match="o: relative error 1.00e-02"):
        error_beside_eager("o", (1.01 * exact).float(), exact, near.float())
    with pytest.raises(GateError, match="o: relative error 1.00e"):
        error_beside_eager("o", torch.zeros(50), exact, near.float())


def test_the_larger_error_stays():
    first, second = {"o": {"ours": 1.0, "eager": 5.0}}, {"o": {"ours": 2.0}, "to": {"ours": 3.0}}
    assert merged(first, second) == {"o": {"ours": 2.0, "eager": 5.0}, "to": {"ours": 3.0}}
