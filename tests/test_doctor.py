import io
import platform
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import fullstride.doctor
from fullstride import __version__
from fullstride.doctor import NEEDS, PACKAGES, JaxDevice, abilities, devices, doctor, jax_device, version

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
CPU, HOPPER = JaxDevice("cpu"), JaxDevice("gpu", "9.0", "Some GPU")
JAX_ROWS = {"bert", "bert and llm on a GPU"}
LLM_ROWS = {"llm generate, llm serve", "llm, kernels=token, chained or paged"}
LAUNCH = "launch --backend slurm, modal or skypilot"


@pytest.fixture(autouse=True)
def a_machine_without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU of some compute capability."""

    def pretend(major: int, minor: int):
        properties = SimpleNamespace(name="Some GPU", total_memory=141 * 2**30, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))

    return pretend


@pytest.fixture
def absent(monkeypatch):
    """Pretend that packages are not installed."""

    def pretend(*packages: str):
        monkeypatch.setattr(fullstride.doctor, "version", lambda name: None if name in packages else version(name))
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)

    return pretend


def _report() -> str:
    out = io.StringIO()
    doctor(Console(file=out, width=200))
    return out.getvalue()


def _obstacles(jax: JaxDevice | None = CPU) -> dict[str, str | None]:
    return {ability.name: ability.obstacle for ability in abilities(jax)}


def test_the_report_names_versions_devices_and_remedies():
    report = _report()
    assert f"fullstride {__version__}, Python {platform.python_version()}, {platform.platform()}" in report
    assert torch.__version__ in report
    assert all(package in report for package in PACKAGES)
    assert "cores" in report
    assert "device=auto │ cpu" in report
    assert "JAX         │ cpu" in report


def test_an_extra_in_a_remedy_survives_the_markup(absent):
    absent("jax")
    assert "pip install '.[jax]'" in _report()


def test_without_a_gpu_the_cpu_rows_run_and_the_others_say_why(monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)
    found = _obstacles()
    runs = {name for name, obstacle in found.items() if obstacle is None}
    assert {"meanflow, device=cpu", "meanflow, precision=bf16", "torch.compile on the CPU"} <= runs
    for name in ("meanflow, device=cuda", "meanflow, device=mps", "torch.compile and Triton kernels on CUDA"):
        assert "use device=cpu" in str(found[name])
    assert found["meanflow, precision=tf32"] == "TF32 is CUDA's; use precision=fp32 or precision=bf16"


def test_without_torch_every_torch_row_says_how_to_get_it(absent):
    absent("torch")
    found = _obstacles()
    assert len(found) > 1
    for name in found.keys() - JAX_ROWS - LLM_ROWS - {LAUNCH}:
        assert found[name] == "torch not installed; run, from the root of a clone: pip install '.[torch]'"
    assert [name for name, _ in devices(None)] == ["CPU"]
    assert "not installed" in _report()


def test_a_torch_that_does_not_import_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert _obstacles()["meanflow, device=cpu"] == "torch does not import; reinstall it"


def test_a_torch_whose_libraries_are_gone_is_said(monkeypatch, tmp_path):
    """PyTorch opens CUDA's libraries itself, and lets the linker's error through, which is no ImportError."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    assert _obstacles()["meanflow, device=cpu"] == "torch does not import; reinstall it"
    assert [name for name, _ in devices(CPU)] == ["CPU", "JAX"]


def test_without_jax_its_areas_name_what_is_missing(absent):
    absent("jax", "equinox", "optax")
    assert jax_device() is None
    found = _obstacles(None)
    for rows, extra in ((JAX_ROWS, "jax"), (LLM_ROWS, "serve")):
        told = f"jax, equinox, optax not installed; run, from the root of a clone: pip install '.[{extra}]'"
        assert {found[name] for name in rows} == {told}


@pytest.mark.parametrize(("package", "row"), [("uvicorn", "llm generate, llm serve"), ("submitit", LAUNCH)])
def test_what_one_area_needs_is_missing_there_alone(absent, package, row):
    before = _obstacles(HOPPER)
    absent(package)
    found = _obstacles(HOPPER)
    changed = {name for name in found if found[name] != before[name]}
    assert row in changed <= {row, *LLM_ROWS}
    assert str(found[row]).startswith(f"{package} not installed; ")


def test_packages_that_are_named_are_those_of_the_extras():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]

    def all_of(extra: str) -> set[str]:
        named = {re.split(r"[<>=;\[ ]", line.removeprefix("fullstride"))[0]: line for line in extras[extra]}
        other = [re.findall(r"fullstride\[(\w+)\]", line) for line in extras[extra]]
        return {name for name in named if name}.union(*(all_of(name) for found in other for name in found))

    for extra, names in NEEDS.items():
        assert set(names) == all_of(extra), extra


def test_what_jax_takes_is_asked_of_jax(monkeypatch):
    assert jax_device() == JaxDevice("cpu", "", "cpu")
    monkeypatch.setenv("JAX_PLATFORMS", "no-such-platform")
    assert jax_device() is None
    assert "jax finds no device; see what this says" in str(_obstacles(None)["bert and llm on a GPU"])


@pytest.mark.parametrize(("visible", "told"), [(0, "no GPU is visible"), (1, "pip install 'jax[cuda13]'")])
def test_a_jax_without_a_gpu_is_told_apart_from_a_machine_without_one(visible, told, monkeypatch):
    monkeypatch.setattr(fullstride.doctor, "count_gpus", lambda: visible)
    found = _obstacles(CPU)
    assert found["bert"] is None
    assert found["llm generate, llm serve"] is None
    for name in ("bert and llm on a GPU", "llm, kernels=token, chained or paged"):
        assert told in str(found[name])


@pytest.mark.parametrize(("capability", "runs"), [("8.0", False), ("9.0", True)])
def test_the_engines_kernels_need_the_gpu_that_they_were_made_for(capability, runs):
    found = _obstacles(JaxDevice("gpu", capability, "Some GPU"))
    assert found["bert and llm on a GPU"] is None
    obstacle = found["llm, kernels=token, chained or paged"]
    assert obstacle is None if runs else f"not for {capability}; use --kernels plain" in str(obstacle)


def test_a_gpu_is_shown_with_memory_and_capability(gpu):
    gpu(9, 0)
    rows = dict(devices(HOPPER))
    assert rows["CUDA 0"] == "Some GPU, 141.0 GiB, capability 9.0"
    assert rows["JAX"] == "gpu (Some GPU, capability 9.0)"
    assert rows["device=auto"] == "cuda (Some GPU)"


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_short_formats_need_a_new_enough_gpu(gpu, capability, runs, precision):
    gpu(*capability)
    obstacle = _obstacles()[f"meanflow, precision={precision}"]
    assert obstacle is None if runs else "use precision=fp32" in str(obstacle)


@pytest.mark.parametrize("installed", [True, False])
def test_triton_needs_its_package_beside_a_gpu(gpu, monkeypatch, installed):
    gpu(9, 0)
    triton = "3.6.0" if installed else None
    monkeypatch.setattr(fullstride.doctor, "version", lambda name: triton if name == "triton" else version(name))
    obstacle = _obstacles()["torch.compile and Triton kernels on CUDA"]
    assert obstacle == (None if installed else "triton not installed; run: pip install triton")


def test_compiling_on_the_cpu_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    obstacle = _obstacles()["torch.compile on the CPU"]
    assert obstacle == "no C++ compiler no-such-compiler; install one (apt install g++) or set CXX"
