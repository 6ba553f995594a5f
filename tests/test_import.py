import subprocess
import sys

import pytest

HEAVY = {"torch", "jax", "numpy", "scipy", "sklearn", "matplotlib", "torchdiffeq", "PIL"}


def _loaded(module: str, tmp_path) -> set[str]:
    """The top-level modules of a fresh interpreter that imported `module`."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy(tmp_path):
    loaded = _loaded("fullstride", tmp_path)
    assert "fullstride" in loaded
    assert not loaded & (HEAVY | {"typer", "rich"})


@pytest.mark.parametrize(
    "module",
    [
        "fullstride.cli.app",
        "fullstride.cli.meanflow",
        "fullstride.meanflow.config.presets",
        "fullstride.cli.doctor",
        "fullstride.device.select",
        "fullstride.assets.fetch",
    ],
)
def test_the_command_line_loads_no_framework(module, tmp_path):
    assert not _loaded(module, tmp_path) & HEAVY


def test_a_trainer_does_without_what_single_data_sets_and_samplers_need_and_a_cpu_without_triton(tmp_path):
    """CPU builds of PyTorch do not bring it."""
    needed = "meanflow.planning.plan", "meanflow.sampling.generate", "jvp", "step.torch"
    code = (
        "import sys; sys.modules['triton'] = None; import fullstride.meanflow.training.trainer; "
        "print(*{name.partition('.')[0] for name in sys.modules}); "
        f"import {', '.join(f'fullstride.{module}' for module in needed)}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "torch" in loaded
    assert not loaded & {"sklearn", "scipy", "torchdiffeq", "matplotlib"}
