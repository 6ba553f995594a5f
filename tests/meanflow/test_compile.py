import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("network", "backend"), [("unet", "func"), ("unet", "two_pass"), ("song_unet", "func"), ("dit", "func")]
)
def test_the_whole_loss_is_one_graph_with_eagers_gradients(network, backend):
    command = [sys.executable, "-m", "tests.meanflow.compiled_loss", network, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
