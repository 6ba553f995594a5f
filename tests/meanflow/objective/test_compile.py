import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("network", "backend", "guided", "chunk", "split"),
    [
        ("unet", "func", "plain", "0", "static"),
        ("unet", "two_pass", "plain", "0", "static"),
        ("dit", "forward_ad", "plain", "0", "static"),
        ("song_unet", "func", "guided", "0", "static"),
        ("dit", "func", "guided", "0", "static"),
        ("dit", "func", "plain", "2", "static"),
        ("unet", "func", "plain", "0", "shared"),
        ("song_unet", "func", "guided", "0", "shared"),
        ("dit", "func", "recomputed", "0", "shared"),
        ("unet", "func", "predicted", "0", "static"),
        ("dit", "func", "predicted", "0", "shared"),
        ("unet", "func", "averaged", "0", "shared"),
        ("dit", "func", "averaged", "0", "static"),
        ("unet", "func", "huber", "0", "static"),
    ],
)
def test_the_whole_loss_is_one_graph_with_eagers_gradients(network, backend, guided, chunk, split):
    command = [sys.executable, "-m", "tests.meanflow.objective.compiled_loss", network, backend, guided, chunk, split]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
