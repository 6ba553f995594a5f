"""An average made after training, against the one that a run of the same weights kept."""

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.average import average_command, averaged
from fullstride.meanflow.checkpoints.folder import find_checkpoint, read_group
from fullstride.meanflow.checkpoints.start import read_start
from fullstride.meanflow.config.commands import AverageOptions
from fullstride.meanflow.config.presets import LOSSES
from fullstride.meanflow.config.schema import EmaConfig, OptimizerConfig
from fullstride.meanflow.sampling.generate import load_generator
from fullstride.meanflow.training.trainer import train
from tests.meanflow.checkpoints.test_start import config

EPOCHS, STEPS = 6, 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the same weights: one keeps two lengths in every checkpoint, the other a third one."""
    folder = tmp_path_factory.mktemp("average")
    given = {
        "epochs": EPOCHS,
        "save_every": 1,
        "keep": 0,
        "optimizer": OptimizerConfig(lr=3e-3),
        "loss": LOSSES["mse"](),
    }
    several = train(config(folder, ema=EmaConfig([0.9], widths=[0.05, 0.1]), **given))
    other = train(config(folder, ema=EmaConfig([], widths=[0.07]), run_name="other", **given))
    return several, other


def test_the_average_is_nearly_the_one_that_was_kept_and_every_command_takes_it(runs, tmp_path, capsys):
    several, other = runs
    kept = read_group(find_checkpoint(other), "ema_power_0.07")
    found, last, distance = averaged(several, 0.07)
    assert last == find_checkpoint(several)
    assert 0 < distance < 0.05
    own = read_group(last, "model")
    apart = sum(float((own[k] - kept[k]).square().sum()) for k in kept) ** 0.5
    wrong = sum(float((found[k] - kept[k]).square().sum()) for k in kept) ** 0.5
    assert found.keys() == kept.keys()
    assert wrong < 0.05 * apart
    made = average_command(several, AverageOptions(width=0.07, out=tmp_path / "made"))
    assert f"averaged at step {EPOCHS * STEPS}, profile within" in capsys.readouterr().out
    generator = load_generator(tmp_path / "made", "cpu")
    assert str(generator.decay) == "power_0.07"
    assert all(torch.equal(x, found[k]) for k, x in generator.model.state_dict().items())
    assert all(torch.equal(x, found[k]) for k, x in read_start(made).tensors.items())
    with pytest.raises(ConfigError, match="not empty"):
        average_command(several, AverageOptions(width=0.07, out=tmp_path / "made"))


def test_a_stored_average_comes_back_and_is_sampled_by_its_width(runs):
    found, last, _ = averaged(runs[0], 0.05, STEPS * 3)
    assert last.name == f"step_{STEPS * 3:08d}"
    kept = read_group(last, "ema_power_0.05")
    assert all(torch.allclose(found[k], kept[k], rtol=0, atol=1e-6) for k in kept)
    assert str(load_generator(runs[0], "cpu", 0.1).decay) == "power_0.1"
    assert load_generator(runs[0], "cpu").decay == 0.9
    with pytest.raises(ConfigError, match=r"--ema 0.3: expected one of 0.9, power_0.05, power_0.1"):
        load_generator(runs[0], "cpu", 0.3)


def test_what_the_checkpoints_cannot_give_is_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"--width 0.01: the nearest combination of 12 averages .* keep=0"):
        averaged(runs[0], 0.01)
    with pytest.raises(ConfigError, match="--step 5: .* checkpoints of the steps 8, 16"):
        averaged(runs[0], 0.05, 5)
    with pytest.raises(ConfigError, match="--width 0.5: width is 0.5"):
        averaged(runs[0], 0.5)
    plain = train(config(tmp_path))
    with pytest.raises(ConfigError, match="no averages by power functions"):
        averaged(plain, 0.05)
