import subprocess
import sys

import pytest

from tests.meanflow.objective.compiled_loss import CASES


@pytest.mark.parametrize("network", CASES)
def test_the_whole_loss_is_one_graph_with_eagers_gradients(network):
    command = [sys.executable, "-m", "tests.meanflow.objective.compiled_loss", network]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
