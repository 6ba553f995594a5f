import pytest
import torch

from fullstride.bench.gate import GateError
from fullstride.errors import ConfigError
from fullstride.jvp.bench_common import by_format, captured, error_beside_eager, errors_table, flat, make_setup, merged
from tests.jvp.quick import quick  # noqa: F401, a fixture

CPU = torch.device("cpu")


def test_the_setup_is_that_of_its_format(quick):  # noqa: F811
    setup = make_setup(CPU, "bf16", "auto")
    assert setup.dtype == torch.bfloat16
    assert setup.randn(3, 4).dtype == torch.bfloat16
    assert setup.ceilings.gemm == "64^3 bfloat16"
    assert setup.fits(1000)
    assert not setup.fits(1 << 40)
    with pytest.raises(ConfigError, match="TF32 is CUDA's"):
        make_setup(CPU, "tf32", "auto")


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


def test_each_format_of_the_device_has_its_errors(quick):  # noqa: F811
    setup = make_setup(CPU, "fp32", "auto")
    found = by_format(setup, ("bf16", "tf32", "fp32"), lambda s: {"o": {"ours": torch.finfo(s.dtype).eps}})
    assert {name: e["o"]["ours"] for name, e in found.items()} == {"bf16": 2**-7, "fp32": 2**-23}
    assert flat(found) == {"bf16 o, ours": 2**-7, "fp32 o, ours": 2**-23}
    assert [column.header for column in errors_table(found).columns] == ["", "bf16", "fp32"]


def test_a_processor_has_no_graph_to_capture():
    call = lambda: 3  # noqa: E731
    assert captured(call, CPU) is call
