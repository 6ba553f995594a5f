import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("network", "backend", "guided"),
    [
        ("unet", "func", "plain"),
        ("unet", "two_pass", "plain"),
        ("dit", "forward_ad", "plain"),
        ("song_unet", "func", "guided"),
        ("dit", "func", "guided"),
    ],
)
def test_the_whole_loss_is_one_graph_with_eagers_gradients(network, backend, guided):
    command = [sys.executable, "-m", "tests.meanflow.compiled_loss", network, backend, guided]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
