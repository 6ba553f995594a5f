from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.cases.step_jax import ceilings as bench_ceilings
from benchmarks.cases.step_jax import train_step as bench_train_step
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.cases.step_jax.host import Times, difference, gated, parts, slope, started
from benchmarks.cases.step_jax.options import TrainStepOptions
from benchmarks.cases.step_jax.real import fused, verdict
from benchmarks.cases.step_jax.table import Target, break_even
from benchmarks.cases.step_jax.train_step import run
from benchmarks.cases.step_jax.ways import BARE, WAYS, Running, trained
from benchmarks.cases.step_jax.workload import StaticDropout, Workload, tree
from benchmarks.harness.environment import slug
from benchmarks.harness.results import read_result
from fullstride.errors import ConfigError
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import Ceilings
from fullstride.measure.timing import Timing
from tests.step.jax.nets import Net, adam, batch_of, squared


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Skip measuring the rates, and allow implicit dtype promotion, as most users' programs do."""
    monkeypatch.setattr(bench_train_step, "jax_ceilings", lambda *_: Ceilings(1e9, 1e9, "none", 1, [1.0], [1.0]))
    with jax.numpy_dtype_promotion("standard"):
        yield


def _network(*_):
    return Workload("net", lambda: Net(0), squared, adam(), jax.device_put(batch_of(0)), jax.random.key(0), flops=1e6)


def test_every_way_trains_alike():
    ways, first = started(_network(), tuple(WAYS))
    errors = gated(_network(), ways, 1e-4)
    assert set(errors) == set(first) == set(WAYS)
    assert ways[BARE].executable is not None
    assert ways[BARE].compile_ms > 0


def test_a_way_that_trains_otherwise_is_not_timed():
    ways, _ = started(_network(), ("flat list",))
    ways["idle"] = Running(lambda: None, lambda: trained(Net(0)))
    with pytest.raises(GateError, match=r"idle: after 3 steps 1.00e\+00 of the training differs"):
        gated(_network(), ways, 0.5)


def test_the_tree_has_berts_shape():
    assert [len(tree(size).arrays()) for size in ("tiny", "base", "large")] == [136, 616, 1192]
    # Two settings of each of five dropouts.
    assert len(jax.tree.leaves(tree("tiny").model())) == 45 + 10
    assert len(jax.tree.leaves(tree("tiny", StaticDropout).model())) == 45


def test_a_section_without_a_row_does_not_keep_the_next_from_being_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_train_step, "step_times", lambda *_, **__: {})
    monkeypatch.setattr(bench_train_step, "host_times", lambda *_: {"flat list": _times(1.0, 2.0)})
    monkeypatch.setattr(bench_train_step, "parts", lambda *_: {})
    options = TrainStepOptions(model="tiny", calls=10, only=("TrainStep",), sections=("step", "host"))
    with pytest.raises(ConfigError, match="train-step--tiny--step--.* was not written. Give more time"):
        run(options, _network, tmp_path)
    (path,) = tmp_path.glob("*.json")
    assert read_result(path)["conditions"]["section"] == "host"


def test_the_host_section(tmp_path, capsys):
    (path,) = run(TrainStepOptions(model="tiny", calls=10, only=("TrainStep", "filter_jit")), _network, tmp_path)
    result = read_result(path)
    rows = {row["name"]: row for row in result["rows"]}
    assert {"TrainStep", "TrainStep grouped", "filter_jit", "cached_filter_jit", "flat list"} <= rows.keys()
    assert "hoisted partition" not in rows
    assert rows["flat list"]["extra"]["over_flat"]["ratio"] == 1
    assert rows["filter_jit"]["extra"]["over_flat"]["ratio"] > 1.5
    assert rows["filter_jit"]["extra"]["arrays"] == 136
    assert rows["filter_jit, after: combine"]["timing"]["median_ms"] > 0
    assert result["conditions"]["targets"] == []
    assert max(result["gate"].values()) < 1e-5
    assert len(rows["TrainStep"]["timing"]["samples_ms"]) == 10
    out = capsys.readouterr().out
    assert "TrainStep grouped" in out
    assert path.name.startswith("train-step--tiny--host--trainstep-filter-jit--")


@pytest.mark.thorough
def test_sections_about_trees(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_train_step, "SIZES", ("tiny", "mini"))
    options = TrainStepOptions(("leaves", "static"), model="tiny", calls=10, only=("TrainStep",))
    leaves, static = (read_result(path) for path in run(options, _network, tmp_path))
    assert leaves["conditions"]["fits"].keys() == {"flat list", "TrainStep", "TrainStep grouped"}
    assert [row["extra"]["arrays"] for row in leaves["rows"]] == [136] * 3 + [232] * 3
    assert {row["name"] for row in static["rows"]} >= {"TrainStep, leaves", "TrainStep, static"}
    assert "us an array" in capsys.readouterr().out


def test_the_real_step_beside_its_bare_executable(tmp_path, capsys):
    traces, ways = tmp_path / "traces", ("TrainStep", "=filter_jit donated")
    options = TrainStepOptions(("step",), modes=("sdpa",), only=ways, seconds=0.5, profile=traces)
    result = read_result(run(options, _network, tmp_path)[0])
    rows = {row["name"].removesuffix(", sdpa"): row for row in result["rows"]}
    # The first is begun whatever time there is.
    assert rows[BARE]["extra"]["over_bare"]["ratio"] == 1
    assert rows[BARE]["extra"]["fusions"]["random"] == 0
    assert rows[BARE]["extra"]["within"] == "yes"
    assert rows[BARE]["extra"]["cpu"]["median_ms"] > 0
    assert rows[BARE]["floor"]["arithmetic_ms"] == 1.0
    left = {one["name"].removesuffix(", sdpa") for one in result["conditions"]["left_out"]}
    assert left | rows.keys() == {BARE, "TrainStep", "TrainStep grouped", "filter_jit donated"}
    assert "waited ms" in capsys.readouterr().out
    for name in rows:
        assert list((traces / "sdpa" / slug(name)).rglob("*.xplane.pb"))
        assert rows[name]["extra"]["profile"]["launches"] > 0


def test_what_had_no_time_is_left_out_by_name(tmp_path):
    options = TrainStepOptions(("step",), modes=("sdpa", "dropout"), only=("TrainStep",), seconds=0.0)
    result = read_result(run(options, _network, tmp_path)[0])
    assert [row["name"] for row in result["rows"]] == [f"{BARE}, sdpa"]
    names = ["TrainStep, sdpa", "TrainStep grouped, sdpa", f"{BARE}, dropout"]
    names += ["TrainStep, dropout", "TrainStep grouped, dropout"]
    assert result["conditions"]["left_out"] == [{"name": name, "why": "no time"} for name in names]


def test_no_section_but_the_first_is_begun_without_time(tmp_path, capsys):
    options = TrainStepOptions(
        ("step", "host"), model="tiny", calls=10, modes=("sdpa",), only=("TrainStep",), seconds=0.0
    )
    (path,) = run(options, _network, tmp_path)
    assert read_result(path)["conditions"]["section"] == "step"
    assert "left out: host: no time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("modes", "named"),
    [
        pytest.param(("dropout", "sdpa"), None, marks=pytest.mark.thorough),
        pytest.param(("eager",), "eager", marks=pytest.mark.thorough),
        (("sdpa", "eager", "dropout"), "sdpa-eager-dropout"),
    ],
)
def test_other_modes_than_the_usual_two_have_a_file_of_their_own(tmp_path, modes, named):
    (path,) = run(TrainStepOptions(("step",), modes=modes, only=("TrainStep",), seconds=0.0), _network, tmp_path)
    assert read_result(path)["conditions"].get("mode") == named
    assert (f"--{named}--" in path.name) is (named is not None)


@pytest.mark.parametrize("length", [pytest.param(TrainStepOptions.length, marks=pytest.mark.thorough), 96])
def test_results_with_flags_of_xlas_have_a_file_of_their_own(tmp_path, monkeypatch, length):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    sizes = TrainStepOptions(("step",), length=length, only=("TrainStep",), seconds=0.0)
    (usual,) = run(sizes, _network, tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    (other,) = run(sizes, _network, tmp_path)
    assert usual != other
    at = read_result(other)["conditions"]["at"]
    plain = read_result(usual)["conditions"].get("at", "")
    assert at.removeprefix(plain).lstrip("-").startswith("xla-")
    assert "fast-math" in at
    assert "xla" not in plain


def test_names_that_are_not():
    with pytest.raises(ConfigError, match="--section=hots: expected one of host"):
        TrainStepOptions(("hots",))
    with pytest.raises(ConfigError, match="--mode=x"):
        TrainStepOptions(modes=("x",))
    with pytest.raises(ConfigError, match="--only nothing: no way .* in its name; expected .* filter_jit"):
        run(TrainStepOptions(model="tiny", only=("nothing",)), _network, Path("unused"))


@pytest.mark.thorough  # the step above is compared with ways that are asked for alone, too
@pytest.mark.parametrize("asked", ["flat", "=flat list"])
def test_what_is_compared_with_may_be_asked_for_alone(tmp_path, asked):
    (path,) = run(TrainStepOptions(("static",), model="tiny", calls=10, only=(asked,)), _network, tmp_path)
    assert [row["name"] for row in read_result(path)["rows"]] == ["flat list, leaves", "flat list, static"]


def _times(*cpu: float) -> Times:
    timing = Timing(0.0, cpu, None)
    return Times(timing, timing, timing)


def test_targets_are_medians_of_ratios():
    times = {"a": _times(1.0, 2.0, 30.0), "b": _times(2.0, 4.0, 10.0)}
    judged = Target("a", "b", 0.5).judged(times)
    assert (judged["ratio"], judged["passed"]) == (0.5, True)
    assert Target("a", "b", 0.49).judged(times)["passed"] is False


def test_break_even_and_slope():
    assert break_even(3000.0, 10.0, 1000.0, 30.0) == 100
    assert break_even(1000.0, 10.0, 3000.0, 30.0) == 0
    assert break_even(1000.0, 30.0, 3000.0, 30.0) is None
    assert slope([100, 300, 500], [1.2, 3.2, 5.2]) == pytest.approx((10.0, 0.2))


def test_a_verdict_is_as_sure_as_its_intervals():
    near, above, wide = ({"interval": list(x)} for x in ((0.99, 1.005), (1.02, 1.1), (0.9, 1.2)))
    assert verdict([near, near], 1.01) == "yes"
    assert verdict([near, above], 1.01) == "no"
    assert verdict([near, wide], 1.01) == "open"
    assert verdict([{"interval": None}], 1.01) == "open"


def test_differences_are_of_what_was_trained():
    start, reference = [np.zeros(2), np.ones(3)], [np.asarray([3.0, 0.0]), np.asarray([1.0, 5.0, 1.0])]
    assert difference(reference, reference, start) == 0
    assert difference(start, reference, start) == 1
    assert difference([reference[0], start[1]], reference, start) == pytest.approx(4 / 5)


def test_parts_are_measured():
    found = parts(tree("tiny"), 10)
    assert found["filter_jit, after: combine"].median_ms > found["cached, before: read"].median_ms > 0


def test_ceilings_are_rates(monkeypatch):
    monkeypatch.setattr("benchmarks.cases.step_jax.ceilings.GEMM_SIZE", {"cpu": 64})
    monkeypatch.setattr("benchmarks.cases.step_jax.ceilings.COPY_BYTES", {"cpu": 1 << 16})
    for moved, passes in (("copy", 2), ("read", 1)):
        found = jax_ceilings(moved=moved)
        assert found.flops == pytest.approx(2 * 64**3 / np.median(found.gemm_ms) * 1e3)
        assert found.bytes == pytest.approx(passes * (1 << 16) / np.median(found.copy_ms) * 1e3)
        assert (found.gemm, found.moved) == ("64^3 float32", moved)


def test_a_ceiling_is_of_one_call_of_a_row_that_is_waited_for_once(monkeypatch):
    calls = []

    class Result:
        def block_until_ready(self):
            calls.append("wait")

    def function(*given):
        calls.append(given)
        return Result()

    monkeypatch.setattr(bench_ceilings, "IN_A_ROW", {"cpu": 5})
    monkeypatch.setattr(bench_ceilings, "measure", lambda call, *_: call() or Timing(0.0, (10.0, 20.0), None))
    assert bench_ceilings._milliseconds(function, 1, 2) == [2.0, 4.0]
    assert calls == [(1, 2)] * 5 + ["wait"]


XORS = "".join(f"  %x.{i} = u32[4]{{0}} xor(%q, %q)\n" for i in range(12))
HLO = f"""HloModule jit_step

%dropped (p: f32[4], q: u32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
{XORS}  %c = pred[4]{{0}} compare(%x.11, %q), direction=LT
  ROOT %s = f32[4]{{0}} select(%c, %p, %p)
}}

%bits (q: u32[4]) -> u32[4] {{
  %q = u32[4]{{0}} parameter(0)
  ROOT %r = u32[4]{{0}} rng-bit-generator(%q), algorithm=rng_default
}}

%added (p: f32[4]) -> f32[4] {{
  ROOT %a = f32[4]{{0}} add(%p, %p)
}}

ENTRY %main (p: f32[4], q: u32[4]) -> f32[4] {{
  %f.1 = f32[4]{{0}} fusion(%p, %q), kind=kLoop, calls=%dropped
  %f.2 = u32[4]{{0}} fusion(%q), kind=kLoop, calls=%bits
  ROOT %f.3 = f32[4]{{0}} fusion(%f.1), kind=kLoop, calls=%added
}}
"""


def test_what_draws_random_bits_is_found():
    assert fused(HLO) == {
        "fusions": 3,
        "random": 2,
        "random_and_select": 1,
        "operations_of_largest_random": 15,
        "exponential": 0,
        "exponential_and_select": 0,
        "exponential_and_random": 0,
    }


def test_where_softmax_is_masked_and_dropped_is_found():
    weights = "  %e = f32[4]{0} exponential(%p)\n  ROOT %a = f32[4]{0} add(%e, %p)"
    plain = HLO.replace("  ROOT %a = f32[4]{0} add(%p, %p)", weights)
    masked = HLO.replace("  %c = pred", "  %e = f32[4]{0} exponential(%p)\n  %c = pred")
    found = [
        [fused(text)[f"exponential{rest}"] for rest in ("", "_and_select", "_and_random")] for text in (plain, masked)
    ]
    assert found == [[1, 0, 0], [1, 1, 1]]
