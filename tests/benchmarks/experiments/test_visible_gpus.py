import os

import pytest
from typer.testing import CliRunner

from benchmarks.cli.app import app
from benchmarks.experiments import visible_gpus
from benchmarks.experiments.visible_gpus import gpus_of
from fullstride.errors import ConfigError


@pytest.fixture
def machine(monkeypatch):
    """A machine with GPUs of these names, as CUDA_VISIBLE_DEVICES gives them; of parts of one a process finds one."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def has(*there: str) -> None:
        def count(visible: str | None = None) -> int:
            given = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
            found = there if given is None else [name for name in given.split(",") if name in there]
            parts = [name for name in found if name.startswith("MIG-")]
            return len(found) - max(0, len(parts) - 1)

        monkeypatch.setattr(visible_gpus, "count_gpus", count)

    return has


def test_numbers_count_the_gpus_that_are_visible(monkeypatch, machine):
    machine("0", "1", "4", "GPU-7")
    assert gpus_of("1, 0") == ["1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    assert gpus_of("1,0") == ["GPU-7", "4"]
    assert gpus_of("GPU-7") == ["GPU-7"]
    for other in ("2", "GPU-8", "-1"):
        with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES=4,GPU-7 has no {other}"):
            gpus_of(f"0,{other}")
    with pytest.raises(ConfigError, match="expected each GPU once"):
        gpus_of("1,GPU-7")
    assert gpus_of("1,GPU-7", shared=True) == ["GPU-7", "GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="is empty, which hides every GPU"):
        gpus_of("0")


@pytest.mark.parametrize("text", ["0,", ",", ""])
def test_gpus_that_are_none_are_refused(text, machine):
    machine("0", "1")
    with pytest.raises(ConfigError, match="expected numbers of GPUs, as in 0,1"):
        gpus_of(text, shared=True)


def test_gpus_that_are_not_there_are_refused_with_what_is(machine, monkeypatch):
    machine("0", "1")
    assert gpus_of("1,0") == ["1", "0"]
    with pytest.raises(ConfigError, match="^--gpus 1,7: CUDA finds no GPU 7; expected some of 0 to 1, as many as are"):
        gpus_of("1,7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(ConfigError, match="^--gpus 0: CUDA finds no GPU 5; no GPU is visible here; check nvidia-smi"):
        gpus_of("0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    machine("0")
    with pytest.raises(ConfigError, match="^--gpus GPU-ab,1: CUDA finds no GPU GPU-ab, 1; expected 0, as many as are"):
        gpus_of("GPU-ab,1")
    machine()
    with pytest.raises(
        ConfigError, match="^--gpus 0: CUDA finds no GPU 0; no GPU is visible here; .*leave --gpus out$"
    ):
        gpus_of("0", shared=True)


def test_parts_of_one_gpu_are_there_each_by_itself(machine):
    machine("MIG-a", "MIG-b")
    assert gpus_of("MIG-a,MIG-b") == ["MIG-a", "MIG-b"]
    with pytest.raises(ConfigError, match="CUDA finds no GPU MIG-c; expected 0"):
        gpus_of("MIG-a,MIG-c")


@pytest.mark.parametrize(
    "words",
    [["phase2"], ["phase3", "--scale", "smoke"], ["bert", "--scale", "cpu"], ["time-to-quality", "--scale", "smoke"]],
)
def test_experiments_begin_nothing_on_gpus_that_are_not_there(words, machine, tmp_path):
    machine()
    given = ["--code", "fullstride"] if words[0] == "time-to-quality" else []
    done = CliRunner().invoke(app, [*words, *given, "--gpus", "0,1", "--runs", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr == (
        "error: --gpus 0,1: CUDA finds no GPU 0, 1; no GPU is visible here; check nvidia-smi and CUDA_VISIBLE_DEVICES, "
        "or leave --gpus out\n"
    )
    assert not list(tmp_path.rglob("*.log"))
