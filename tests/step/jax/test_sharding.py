import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from fullstride.errors import ConfigError
from fullstride.step.jax import Sharding
from tests.helpers.compiled_soon import FLAGS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.thorough)])
def found(request, tmp_path_factory):
    """Results of a process with as many virtual devices as the parameter says."""
    flags = f"{FLAGS} --xla_force_host_platform_device_count={request.param}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, "-W", "error", "-m", "tests.step.jax.on_devices", str(tmp_path_factory.mktemp("run"))]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"count": request.param}


@pytest.mark.parametrize("name", ["data grouped", "fsdp", "fsdp grouped"])
def test_devices_agree_with_one(found, name):
    result = found[name]
    assert result["devices"] == found["count"]
    assert result["error"] < 2e-5
    assert result["loss_error"] < 1e-5
    assert result["traces"] == 1
    assert result["donated"]


def test_data_parallel_copies_the_state_and_fsdp_divides_it(found):
    count = found["count"]
    assert found["data grouped"]["divided"] == 0
    assert found["data grouped"]["held"] == 1
    assert "all-reduce" in found["data grouped"]["collectives"]
    for name in ("fsdp", "fsdp grouped"):
        assert found[name]["divided"] > 0
        assert found[name]["held"] < 1 / count + 0.25
        assert "all-gather" in found[name]["collectives"]


def test_several_steps_checkpoints_and_refusals(found):
    assert found["several"] < 2e-5
    assert found["moved"]
    assert all(found["back"])
    assert found["refused"] == f"batch['x'] is float32[3,7,3]; its axis 1 must be divided by {found['count']} devices"


def test_fsdp_divides_the_longest_axis_that_can_be(found):
    assert found["rules"] == [[None, "data"], [], []]


def test_a_mesh_without_a_data_axis():
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    with pytest.raises(ConfigError, match=r"the mesh's axes are \('model',\); expected one called 'data'"):
        Sharding(mesh, lambda path, shape: PartitionSpec())
