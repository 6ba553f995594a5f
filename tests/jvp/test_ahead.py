import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("family", ["attention", "norms", "averages"])
def test_kernels_compile_for_hopper(family):
    command = [sys.executable, "-m", "tests.jvp.ahead", family]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=os.environ | {"TRITON_INTERPRET": "0"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert " launches: " in done.stdout


def test_kernels_of_traced_operators_are_compiled_by_threads():
    command = [sys.executable, "-m", "tests.jvp.while_traced"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=os.environ | {"TRITON_INTERPRET": "0"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled while traced" in done.stdout
