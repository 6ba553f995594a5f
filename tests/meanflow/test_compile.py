import subprocess
import sys

import pytest


@pytest.mark.parametrize("backend", ["func", "two_pass"])
def test_the_whole_loss_is_one_graph_with_eagers_gradients(backend):
    command = [sys.executable, "-m", "tests.meanflow.compiled_loss", backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
