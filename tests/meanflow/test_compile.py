import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("network", "backend", "guided", "chunk"),
    [
        ("unet", "func", "plain", "0"),
        ("unet", "two_pass", "plain", "0"),
        ("dit", "forward_ad", "plain", "0"),
        ("song_unet", "func", "guided", "0"),
        ("dit", "func", "guided", "0"),
        ("dit", "func", "plain", "2"),
    ],
)
def test_the_whole_loss_is_one_graph_with_eagers_gradients(network, backend, guided, chunk):
    command = [sys.executable, "-m", "tests.meanflow.compiled_loss", network, backend, guided, chunk]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
