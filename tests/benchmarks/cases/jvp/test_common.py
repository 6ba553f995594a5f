import pytest
import torch

from benchmarks.cases.jvp.common import LeftOut, OpWork, broken, by_format, make_setup, wrong_of
from fullstride.errors import ConfigError
from fullstride.measure.gate import GateError
from tests.benchmarks.cases.jvp.quick import quick  # noqa: F401, a fixture

CPU = torch.device("cpu")


def test_the_setup_is_that_of_its_format(quick):  # noqa: F811
    setup = make_setup(CPU, "bf16", "auto", 60.0)
    assert setup.dtype == torch.bfloat16
    assert setup.randn(3, 4).dtype == torch.bfloat16
    assert setup.ceilings.gemm == "64^3 bfloat16"
    assert setup.fits(1000)
    assert not setup.fits(1 << 40)
    with pytest.raises(ConfigError, match="TF32 is CUDA's"):
        make_setup(CPU, "tf32", "auto", 60.0)


def test_each_format_of_the_device_has_its_errors(quick):  # noqa: F811
    setup = make_setup(CPU, "fp32", "auto", 60.0)

    def errors(s):
        if s.precision == "fp16":
            raise GateError("wrong")
        return {"o": {"ours": torch.finfo(s.dtype).eps}}

    found, left_out = by_format(setup, ("bf16", "tf32", "fp16", "fp32"), errors)
    assert {name: e["o"]["ours"] for name, e in found.items()} == {"bf16": 2**-7, "fp32": 2**-23}
    assert left_out == [LeftOut("errors", "fp16", "ours", "GateError: wrong")]
    found, left_out = by_format(make_setup(CPU, "fp32", "auto", 0.0), ("bf16",), errors)
    assert (found, left_out) == ({}, [LeftOut("errors", "bf16", "ours", "no time")])


def test_a_row_goes_in_turn_through_its_sets(quick):  # noqa: F811
    setup, made, called = make_setup(CPU, "fp32", "auto", 60.0), [], []

    def make(i):
        made.append(i)
        return lambda: called.append(i)

    row = setup.row(OpWork("s", "forward", "ours", 100, 0, 0, 0), make, sets=3)
    assert not isinstance(row, LeftOut)
    assert made == [0, 0, 1, 2]
    assert called[-6:] == [0, 1, 2] * 2
    assert row.floor.ms == pytest.approx(100 / setup.ceilings.flops * 1e3)
    assert row.timing.peak_bytes is None


def test_only_memory_and_time_excuse_what_is_missing_of_ours():
    assert broken("s", "k", "ours", torch.OutOfMemoryError("x")) == LeftOut("s", "k", "ours", "no memory")
    excused = [LeftOut("s", "k", "ours", why) for why in ("no memory", "no time")]
    assert wrong_of([*excused, broken("s", "k", "vanilla", RuntimeError("theirs"))]) == []
    wrong = wrong_of([*excused, broken("s", "k", "ours", RuntimeError("mine"))])
    assert wrong == ["s k: RuntimeError: mine"]
