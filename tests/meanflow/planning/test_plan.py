import json
import random
import re
import subprocess
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from fullstride.cli.app import app
from fullstride.errors import ConfigError
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.config.schema import LossConfig
from fullstride.meanflow.planning.cost import (
    Costs,
    NetworkWork,
    PlannedStep,
    Rates,
    all_reduce_ms,
    duration,
    memory_bytes,
    parts,
)
from fullstride.meanflow.planning.fit import fitted
from fullstride.meanflow.planning.plan import Machine, derived_share, largest_batch, make_plan, passes_without_gradient
from fullstride.meanflow.planning.work import count_work

WORK = NetworkWork(1_000, 2e6, 3e6, 5e5, 7e4, 4e4, 3e3, 11)
EACH = {"bf16": 1.25, "tf32": 1.5, "fp32": 2.0}
COSTS = Costs(EACH, 1.1, 2.5, 1.2, 4.0, {"bf16": 1.0, "tf32": 0.9, "fp32": 2.0}, 1.7, EACH)
RATES = Rates(1e12, 1e9)
TINY = ["model=unet_tiny", "precision=fp32", "ema.decays=[0.9,0.99]"]


def test_a_step_is_the_sum_of_its_kinds():
    ratio, batch = random.uniform(0.1, 1), random.randrange(1, 99)
    found = parts(
        WORK, PlannedStep(batch, ratio, "tf32", "graph", True, averages=2, period=4, accumulate=3), RATES, COSTS
    )
    passes, images = 3 + 0.9 * ratio, 3 * batch
    assert found == pytest.approx(
        {
            "convolutions": images * passes * 2e6 / 1e12 * 1e3 * 1.5,
            "matrix products": images * passes * 3e6 / 1e12 * 1e3 * 1.1,
            "attention": images * (3.5 + 2 * ratio) * 5e5 / 1e12 * 1e3 * 2.5,
            "norms and memory": images * passes * (7e4 * 1.2 + 4 * 3e3 * 1.7) / 1e9 * 1e3,
            "calls": 3 * 4 * 11 * 4e-3,
            "optimizer and averages": (36 + 4 * 5 / 4) * 1_000 / 1e9 * 1e3,
        }
    )


def test_memory_has_weights_their_copies_and_activations():
    assert memory_bytes(WORK, PlannedStep(8), COSTS) == 6 * 1_000 + 8 * 4e4 * 1.25
    assert (
        memory_bytes(WORK, PlannedStep(8, precision="fp32", whole=True, averages=3), COSTS) == 28 * 1_000 + 8 * 4e4 * 2
    )


@pytest.mark.parametrize("backend", ["eager", "compile", "auto"])
def test_what_waits_for_the_host_is_not_predicted(backend):
    with pytest.raises(ConfigError, match="waits for the host"):
        PlannedStep(8, backend=backend)


def test_gradients_go_around_a_ring():
    assert all_reduce_ms(10**9, 4, 100e9) == pytest.approx(60.0)
    assert all_reduce_ms(10**9, 2, 100e9) == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("settings", "passes"), [((1.0, 0.0, 0.1), 0), ((2.0, 0.0, 0.1), 1), ((0.2, 0.9, 0.1), 2), ((0.2, 0.9, 0.0), 0)]
)
def test_guidance_takes_the_passes_of_its_velocity(settings, passes):
    omega, kappa, dropped = settings
    assert passes_without_gradient(LossConfig(omega=omega, kappa=kappa, label_dropout=dropped)) == passes


def _plan(overrides, gpus=1, link=0.0, **options):
    return make_plan(compose(overrides), Machine({"fp32": RATES}, 10**9, gpus, link), COSTS, **options)


def test_gpus_share_the_batch_and_add_the_sum_of_gradients():
    alone, shared = _plan([*TINY, "data.batch_size=64"]), _plan([*TINY, "data.batch_size=128"], 2, 1e9)
    assert shared.parts == pytest.approx(alone.parts)
    assert shared.ms - alone.ms == pytest.approx(all_reduce_ms(alone.work.parameters, 2, 1e9))
    assert alone.steps == 100 * (898 // 64)
    assert alone.seconds == pytest.approx(alone.ms * alone.steps / 1e3)


@pytest.mark.parametrize(
    ("every", "steps", "first"), [(7, None, 7 * 14), (0, None, 100 * 14), (1000, None, 100 * 14), (7, 20, 20)]
)
def test_the_first_checkpoint_is_that_of_save_every_or_the_last(every, steps, first):
    plan = _plan([*TINY, "data.batch_size=64", f"save_every={every}"], steps=steps)
    assert plan.epoch_seconds == pytest.approx(plan.ms * 14 / 1e3)
    assert plan.first_save_seconds == pytest.approx(plan.ms * first / 1e3)


def test_an_epoch_takes_longer_the_more_samples_are_in_the_jvp():
    ratios = (0.0, 0.25, 0.5, 0.75)
    times = [_plan([*TINY, "data.batch_size=64", f"loss.meanflow_ratio={ratio}"]).epoch_seconds for ratio in ratios]
    assert times == sorted(set(times))


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0123, "0.012 s"),
        (0.5, "0.500 s"),
        (59.9, "59.9 s"),
        (480.0, "8.00 min"),
        (5400.0, "1.50 h"),
        (323_960.0, "3.75 d"),
        (86_400.0 * 1234, "1,234 d"),
    ],
)
def test_times_are_in_units_people_read(seconds, told):
    assert duration(seconds) == told


def test_what_a_step_takes_the_derivative_of_is_planned():
    """`full` and `bernoulli` differentiate the whole batch; flow matching and a ratio of 1 do alike by any split."""
    of = lambda *settings: _plan([*TINY, "data.batch_size=64", *settings]).ms  # noqa: E731
    whole = of("loss.meanflow_ratio=1")
    assert of("loss.split=full") == of("loss.split=bernoulli") == whole > of() > of("loss=mse")
    assert of("loss.split=static", "loss.meanflow_ratio=1") == whole
    # Its tangent is a forward pass more of the samples that have one.
    per_pass = (whole - of("loss=mse")) / COSTS.tangent["fp32"]
    assert of("loss=imf", "loss.meanflow_ratio=1") - whole == pytest.approx(per_pass, rel=0.2)
    assert of("loss=mse", "loss.split=static") == of("loss=mse", "loss.jvp_backend=two_pass") == of("loss=mse")


def test_the_whole_batch_in_the_derivative_takes_what_was_measured():
    known = fitted()
    files = Path("benchmarks/results").glob("meanflow-step--unet--bf16--compile,*alternatives*.json")
    results = [json.loads(file.read_text()) for file in files]
    rows = [row for data in results if data["environment"]["gpu"]["name"] == known.machine for row in data["rows"]]
    (row,) = [row for row in rows if row["name"] == "E: the whole batch in the JVP, ratio 25%, compile+graph"]
    config = compose(["model=unet", "data=cifar10", "data.batch_size=64", "precision=bf16", "loss.split=full"])
    step = PlannedStep(64, derived_share(config.loss))
    planned = sum(parts(count_work(config.model, (3, 32, 32)), step, known.rates["bf16"], known.costs).values())
    assert planned == pytest.approx(median(row["timing"]["samples_ms"]), rel=0.15)


def test_the_largest_batch_fits_and_twice_as_much_does_not():
    plan = _plan([*TINY, "data.batch_size=64"])
    fits = largest_batch(plan, int(plan.memory), COSTS)
    assert fits == 64
    assert largest_batch(plan, plan.work.parameters * 24, COSTS) == 0


@pytest.mark.parametrize(
    ("overrides", "options", "said"),
    [
        (["data=image_folder", "data.path=x", "model=unet_tiny"], {}, "x: no such folder"),
        (["data=digits", "data.image_size=16", "model=unet_tiny"], {}, "data=digits cannot be resized"),
        (["data=cifar10", "data.image_size=16", "model=unet_tiny"], {}, "data.fit=pad cannot shrink"),
        ([*TINY, "data.batch_size=63"], {"gpus": 2, "link": 1.0}, "over 2 processes: expected a multiple of 2"),
        (
            [*TINY, "data.batch_size=8", "loss.meanflow_ratio=0.25"],
            {"gpus": 8, "link": 1.0},
            "loss.meanflow_ratio=0.25 is 0 samples over the processes and 2 in one process",
        ),
        (
            [*TINY, "data.batch_size=8", "loss.split=bernoulli", "loss.weighting=huber", "distributed=fsdp"],
            {"gpus": 8, "link": 1.0},
            "loss.weighting=huber expects at least 2 in each",
        ),
        (["model=unet_tiny", "precision=tf32"], {}, "measured rates for fp32 only"),
        (TINY, {"gpus": 2}, "pass --link-gbs"),
        ([*TINY, "loss.jvp_backend=two_pass"], {}, "loss.jvp_backend=two_pass loss.jvp_chunk=0: expected func and 0"),
        ([*TINY, "loss.jvp_chunk=8"], {}, "loss.jvp_chunk=8: expected func and 0"),
        ([*TINY, "loss.split=static"], {}, "a network that runs twice cannot be planned"),
        (
            [*TINY, "data.batch_size=500", "gradient_accumulation_steps=2"],
            {},
            "= 1000 images a step, the training half",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(overrides, options, said):
    with pytest.raises(ConfigError, match=said):
        _plan(overrides, **options)


def test_the_command_plans_one_of_your_own_and_what_others_published(monkeypatch):
    monkeypatch.setattr("fullstride.cli.meanflow_plan.PUBLISHED", {"digits": (TINY, 1_000_000)})
    told = CliRunner().invoke(app, ["meanflow", "plan"])
    assert told.exit_code == 0, told.output
    assert re.search(r"digits +0.4M +128 +1 .* 1,000,000 +[\d.]+ m?s +[\d.]+ \w+ +[\d.]+ \w+", told.output)
    command = ["meanflow", "plan", *TINY, "data.batch_size=512", "--tflops", "10", "--tbs", "1", "--memory-gib", "0.05"]
    told = CliRunner().invoke(app, command)
    assert "128 samples fit at once; accumulate, or use more GPUs" in told.output
    half = CliRunner().invoke(app, ["meanflow", "plan", "--tflops", "5"])
    assert half.exit_code == 2
    assert "expected both or neither" in half.output


def test_the_benchmarks_fit_the_factors_anew(tmp_path, monkeypatch):
    lines = []
    run = lambda line, env: lines.append(line) or subprocess.CompletedProcess(line, 3)  # noqa: E731
    monkeypatch.setattr("fullstride.cli.meanflow_plan.subprocess.run", run)
    assert CliRunner().invoke(app, ["meanflow", "plan", "--fit", "results"]).exit_code == 3
    assert [line[1:] for line in lines] == [["-m", "benchmarks", "fit-plan", "results"]]
    monkeypatch.setattr("fullstride.__file__", str(tmp_path / "fullstride" / "__init__.py"))
    without = CliRunner().invoke(app, ["meanflow", "plan", "--fit", "results"])
    assert without.exit_code == 2
    assert "run it from the root of a clone" in " ".join(without.output.split())


def test_the_command_says_in_which_memory_order_a_network_of_convolutions_was_measured():
    for overrides, said in ((TINY, True), ([*TINY, "channels_last=true"], False), (["model=dit_tiny"], False)):
        told = CliRunner().invoke(app, ["meanflow", "plan", *overrides])
        assert told.exit_code == 0, told.output
        assert ("planned with channels_last=true" in told.output) == said
