"""Tests of the comparison with the official code's whole step, with a stand-in for its checkout."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cases.meanflow import peer as bench_peer
from benchmarks.cases.meanflow import peer_codes as bench_peer_codes
from benchmarks.cases.meanflow.options import PeerOptions as Options
from benchmarks.cases.meanflow.peer_codes import UNCOUNTED
from benchmarks.cli.app import app
from benchmarks.harness.results import read_result
from fullstride.errors import ConfigError
from fullstride.measure.gate import GateError

STUB = Path(__file__).parents[2] / "official_stub"
TINY = (
    "model=song_unet_tiny",
    "data.batch_size=4",
    "model.channels=16",
    "model.channel_mult=[1]",
    "model.num_blocks=1",
)


def names(state, network: str) -> dict[str, torch.Tensor]:
    """Map the stub's parameter names, which are ours behind `inner`."""
    return {name.removeprefix(f"{network}.inner."): value for name, value in state.items()}


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Reduce the work, and isolate the official modules from those of other tests."""
    precision = torch.get_float32_matmul_precision()
    monkeypatch.setattr(bench_peer_codes, "from_py_meanflow", names)
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = False
    for name in [name for name in sys.modules if name.partition(".")[0] in ("models", "training", "train_arg_parser")]:
        del sys.modules[name]


@pytest.mark.thorough
def test_both_codes_make_the_same_recipes_steps(tmp_path):
    given = ["meanflow-peer", "--official", str(STUB), "--device", "cpu"]
    done = CliRunner().invoke(app, [*given, "--steps", "3", "--out", str(tmp_path), *TINY])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("meanflow-peer--eager--*.json")
    result = read_result(path)
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["fullstride, fp32", "py-meanflow", bench_peer.READY]
    assert all(len(row["timing"]["samples_ms"]) == 3 for row in rows.values())
    assert len({row["floor"]["ms"] for row in rows.values()}) == 1
    assert rows["py-meanflow"]["floor"]["arithmetic_ms"] > 0
    assert 0 <= result["gate"]["py-meanflow's u and du/dt by our network"] < 1e-5
    assert not any("backend=eager" in form for form in result["gate"])  # it is what others are compared with
    loop = sys.modules["training.train_loop"]
    assert len(loop.STEPS) == 2 * (UNCOUNTED + 3)
    assert loop.AUGMENTED == [4] * (UNCOUNTED + 3 + 1)  # once for all steps where that was done before
    args = loop.ARGS[-1]
    assert (args.ratio, args.P_mean_r, args.dropout, args.ema_decays) == (0.75, -4.0, 0.2, [0.9999, 0.9996])
    assert (args.use_edm_aug, args.compile, args.lr) == (True, False, 6e-4)


def test_another_network_is_not_timed(tmp_path, monkeypatch):
    def wrong(state, network):
        return {
            name: value * (1.01 if name == "conv_out.weight" else 1) for name, value in names(state, network).items()
        }

    monkeypatch.setattr(bench_peer_codes, "from_py_meanflow", wrong)
    options = Options(STUB, "cpu", TINY, ("fp32",), steps=1)
    with pytest.raises(GateError, match=r"our network with py-meanflow's weights: u: relative error \d\.\d+e-03"):
        bench_peer.run(options, tmp_path)
    (path,) = tmp_path.glob("*.json")
    result = read_result(path)
    assert [row["name"] for row in result["rows"]] == ["fullstride, fp32"]
    assert "our network" in result["conditions"]["left_out"][0]["why"]


def test_what_there_is_no_time_for_is_named(tmp_path):
    options = Options(STUB, "cpu", TINY, ("fp32", "bf16"), steps=1, seconds=0.0)
    with pytest.raises(ConfigError, match="no row was measured"):
        bench_peer.run(options, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no meanflow/training/train_loop\.py"):
        bench_peer.run(Options(tmp_path, "cpu", TINY, ("fp32",), steps=1), tmp_path)


def test_a_checkout_whose_random_numbers_are_cudas_is_refused_elsewhere(tmp_path):
    checkout = shutil.copytree(STUB, tmp_path / "checkout")
    (checkout / "meanflow" / "models" / "rng.py").touch()
    with pytest.raises(ConfigError, match=r"meanflow/models/rng\.py keeps the random state of a CUDA device"):
        bench_peer.run(Options(checkout, "cpu", TINY, ("fp32",), steps=1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"settings": ("model=unet_tiny", "data.augment=0")}, "model=unet_tiny: the official code has only song_unet"),
        ({"settings": ("data.hflip=false",)}, "data.hflip: the official code has no such setting"),
        (
            {"settings": ("gradient_accumulation_steps=2",)},
            "gradient_accumulation_steps: the official code has no such",
        ),
        ({"settings": ("data.image_size=64",)}, "random images of CIFAR-10's size"),
        ({"settings": ("data.path=there",)}, "random images"),
        ({"precisions": ("fp32", "tf32")}, "precision=tf32: TF32 is CUDA's"),
    ],
)
def test_what_is_no_comparison_is_refused_before_anything_is_measured(given, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        bench_peer.run(Options(STUB, "cpu", **given), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_batch_may_be_larger_than_the_usual_pictures():
    assert len(bench_peer_codes.pictures(3000).train) == 3000
