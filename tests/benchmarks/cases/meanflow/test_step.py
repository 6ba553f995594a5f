from functools import partial

import pytest

from benchmarks.cases.meanflow import step as bench_step
from benchmarks.cases.meanflow import step_sections as bench_step_sections
from benchmarks.cases.meanflow.options import BACKENDS, SECTIONS
from benchmarks.cases.meanflow.options import StepOptions as Options
from benchmarks.cases.meanflow.step import run
from benchmarks.cases.meanflow.step_cases import StepCase
from benchmarks.cases.meanflow.step_gate import TOLERANCE
from benchmarks.cases.meanflow.step_sections import cases_of
from benchmarks.harness.results import read_result
from fullstride.errors import ConfigError
from fullstride.meanflow.config.networks import DiTConfig, MiTConfig
from fullstride.meanflow.config.presets import MODELS
from fullstride.measure.gate import GateError
from fullstride.step.torch import BACKENDS as STEP_BACKENDS
from tests.benchmarks.cases.meanflow.quick_bench import quick  # noqa: F401, a fixture
from tests.benchmarks.cases.meanflow.quick_bench import setup as make

pytestmark = pytest.mark.usefixtures("quick")
CPU = {"device": "cpu", "model": "dit_tiny", "batch_size": 4}


@pytest.mark.parametrize(
    "given", [{"precision": "bf16"}, {"channels_last": True, "model": "unet_tiny"}, {"full_step": True}]
)
def test_the_ratios_are_measured_beside_their_floors(tmp_path, capsys, given):
    path = run(Options(**CPU | given), tmp_path)
    result = read_result(path)
    rows = {row["extra"]["name"]: row for row in result["rows"]}
    assert list(rows) == [
        "FM MSE", "MeanFlow 100%", "MeanFlow 75%", "MeanFlow 25%", "MeanFlow 50%", "MeanFlow 0%",
        "forward", "JVP", "JVP, prediction's graph kept",
    ]  # fmt: skip
    floors = [row["floor"]["arithmetic_ms"] for row in rows.values()]
    assert [f / floors[6] for f in floors] == pytest.approx([3, 4, 3.75, 3.25, 3.5, 3, 1, 2, 2])
    medians = {name: row["timing"]["median_ms"] for name, row in rows.items()}
    for name, row in rows.items():
        assert row["extra"]["over_flow_matching"] == pytest.approx(medians[name] / medians["FM MSE"])
        assert 0 < max(row["extra"]["errors"].values()) < TOLERANCE[given.get("precision", "fp32")]
    assert result["conditions"]["left_out"] == []
    parts = ["full"] if "full_step" in given else ["channels_last"] if "channels_last" in given else []
    assert path.name.split("--")[3:-1] == ["all", "ratios", *parts, "batch-4"]
    weights = 4 * result["conditions"]["parameters"]
    moved = rows["MeanFlow 25%"]["floor"]["memory_ms"] * result["ceilings"]["bytes"] / 1e3 / weights
    assert moved == pytest.approx(3 + 8 + 2 * 3 if "full_step" in given else 3)
    out = capsys.readouterr().out
    assert "x FM: of the fastest FM MSE step of this run, by eager" in out


NAMES = ["FM MSE", "MeanFlow 75%", "by a teacher", "alphaflow, a difference", "imf", "tvm", "an image as the output"]


@pytest.mark.parametrize(
    ("model", "only", "names", "least"),
    [
        ("dit_tiny", (), [*NAMES, "decoupled"], [3, 3.75, 4.75, 3.75, 4.5, 6, 3.75, 3.75]),
        ("mit_tiny", ("imf_whole",), ["FM MSE", "imf_whole"], [3, 4.5]),
    ],
)
def test_each_newer_objective_is_measured_as_its_own_reference_has_it(tmp_path, monkeypatch, model, only, names, least):
    monkeypatch.setitem(MODELS, "dit_tiny", partial(DiTConfig, name="dit_tiny", width=16, depth=2, heads=2))
    monkeypatch.setitem(
        MODELS, "mit_tiny", partial(MiTConfig, name="mit_tiny", width=12, depth=2, heads=2, head_blocks=1)
    )
    rows = read_result(run(Options(**CPU | {"model": model}, sections=("objectives",), only=only), tmp_path))["rows"]
    named = {row["extra"]["name"].removeprefix("MeanFlow 75%, "): row for row in rows}
    assert list(named) == names
    assert all(0 < max(row["extra"]["errors"].values()) < TOLERANCE["fp32"] for row in rows)
    floors = [row["floor"]["arithmetic_ms"] / rows[0]["floor"]["arithmetic_ms"] * 3 for row in rows]
    assert floors == pytest.approx(least)


def test_other_tables_share_what_was_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_step_sections, "BATCHES", (2, 4))
    monkeypatch.setattr("benchmarks.cases.meanflow.step_table.BATCHES", (2, 4))
    sections = ("scaling", "batches", "profile", "backends")
    path = run(Options(**CPU, sections=sections, only=("100%", "MeanFlow 9")), tmp_path)
    assert "--100-meanflow-9--batch-4--" in path.name
    result = read_result(path)
    steps = [(row["extra"]["name"], row["extra"]["batch"]) for row in result["rows"]]
    assert steps == [("FM MSE", 4), ("MeanFlow 100%", 4), ("FM MSE", 2), ("MeanFlow 100%", 2)]
    profile = result["rows"][1]["extra"]["profile"]
    assert profile["ms"] == pytest.approx(sum(profile["groups"].values()))
    assert profile["groups"]["matmul"] > 0
    out = capsys.readouterr().out
    assert "4 of 4" in out
    assert "batch 2" in out
    assert "the JVP adds, eager" in out


def test_a_profile_has_the_step_by_plain_operations_too(tmp_path, capsys):
    rows = read_result(run(Options(**CPU, sections=("profile",)), tmp_path))["rows"]
    assert [row["extra"]["name"] for row in rows] == ["FM MSE", "MeanFlow 100%", "torch.func.jvp of plain operations"]
    assert all(row["extra"]["profile"]["ms"] > 0 for row in rows)
    assert "longest kernels of torch.func.jvp of plain operations, eager" in capsys.readouterr().out


def test_rows_that_there_are_not_are_refused_with_the_names_of_those_that_there_are(tmp_path):
    message = (
        r"^--only MeanFlow 100 %: no row has this in its name; expected a part of one of FM MSE; MeanFlow 100%; .*; JVP"
    )
    with pytest.raises(ConfigError, match=message):
        run(Options(**CPU, only=("MeanFlow 100 %",)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_after_its_time_nothing_is_begun_and_that_is_said(tmp_path, capsys):
    with pytest.raises(ConfigError, match="meanflow-step: no row was measured, expected one; .* was not written"):
        run(Options(**CPU, seconds=0.0), tmp_path)
    told = capsys.readouterr().out
    assert told.count(": no time\n") == 9
    assert "left out: MeanFlow 75%, batch 4, eager: no time" in told
    assert "written to" not in told
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_step_is_named_at_the_end_and_the_rest_is_written(tmp_path, monkeypatch):
    right = bench_step.cases_of

    def with_a_wrong_one(section, setup):
        first = right(section, setup)[0]
        wrong = StepCase("wrong", setup.loss(1.0), lambda setup, loss: lambda m, d: 1.1 * loss.at(m, **d)[0])
        return [first, wrong]

    monkeypatch.setattr(bench_step, "cases_of", with_a_wrong_one)
    with pytest.raises(GateError, match="^wrong, eager: GateError: loss: relative error 1.00e-01"):
        run(Options(**CPU), tmp_path)
    (path,) = tmp_path.iterdir()
    assert [row["extra"]["name"] for row in read_result(path)["rows"]] == ["FM MSE"]


def test_a_backend_that_cannot_run_here_is_refused():
    with pytest.raises(ConfigError, match="backend=graph: CUDA graphs are CUDA's"):
        make(backends=("graph",))


def test_every_section_begins_with_flow_matching_and_names_each_case_once():
    own = make()
    for section in SECTIONS:
        cases = cases_of(section, own)
        assert cases[0].name == "FM MSE"
        assert len({(case.name, case.batch) for case in cases}) == len(cases)
    assert BACKENDS == STEP_BACKENDS
    letters = {case.name[0] for case in cases_of("alternatives", own) if case.name[1] in ":2"}
    assert letters == set("ABDEFGHI")
