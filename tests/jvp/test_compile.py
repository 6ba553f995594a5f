import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("family", "backend", "refused"),
    [
        ("attention", "eager", ""),
        ("attention", "aot_eager", ""),
        ("norms", "aot_eager", ""),
        ("formats", "aot_eager", ""),
        ("explicit", "aot_eager", ""),
        ("networks", "eager", ""),
        ("networks", "aot_eager", ""),
        ("representatives", "inductor", ""),
        ("checkpointed", "aot_eager", ""),
        ("switched", "aot_eager", ""),
        ("dynamic", "aot_eager", ""),
        ("transforms", "aot_eager", "nested"),
        ("transforms", "eager", "gradient"),
        ("transforms", "eager", "vmap"),
    ],
)
def test_one_graph_has_eagers_values_and_gradients(family, backend, refused):
    command = [sys.executable, "-m", "tests.jvp.compiled", family, backend, refused]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
