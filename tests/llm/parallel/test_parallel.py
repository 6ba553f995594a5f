"""Runs the tests of `two_devices.py` in a process that has two virtual devices, which JAX has to know at its start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FLAGS = "--xla_force_host_platform_device_count=2"


@pytest.mark.parametrize("marked", ["not thorough", pytest.param("thorough", marks=pytest.mark.thorough)])
def test_a_model_on_two_devices(marked):
    environment = os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        marked,
        str(HERE / "two_devices.py"),
    ]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
