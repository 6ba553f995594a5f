import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("backend", "families"),
    [
        pytest.param("eager", ["attention"], marks=pytest.mark.thorough),
        ("eager", ["networks", "transforms"]),
        ("aot_eager", ["attention", "masks"]),
        ("aot_eager", ["rules"]),
        ("aot_eager", ["norms", "formats", "explicit", "products"]),
        ("aot_eager", ["networks", "checkpointed", "switched", "dynamic", "transforms"]),
        ("inductor", ["representatives"]),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_one_graph_has_eagers_values_and_gradients(backend, families):
    command = [sys.executable, "-m", "tests.jvp.compiled", backend, *families]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
