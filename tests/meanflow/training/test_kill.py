import pytest

from fullstride.meanflow.checkpoints.folder import checkpoints
from fullstride.meanflow.config.schema import DataConfig
from fullstride.meanflow.training.trainer import train
from tests.meanflow.training.test_trainer import assert_identical, config, learned


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_run_killed_at_random_and_during_saves_ends_as_if_nothing_had_been(forked, tmp_path, seed):
    """SIGKILL on a real process: weights, averages, optimizer, generators and data order are bit-identical."""
    straight = train(config(tmp_path / "straight", epochs=9, data=DataConfig(batch_size=223)))
    (done,) = forked(["tests.meanflow.training.killed_run", str(tmp_path / "killed"), str(seed)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed True") >= 4, done.stdout
    killed = tmp_path / "killed" / "run"
    assert_identical(straight, killed)
    assert learned(straight) == learned(killed)
    assert len(checkpoints(killed)) == 2
    assert len(list((killed / "checkpoints").iterdir())) == 2
