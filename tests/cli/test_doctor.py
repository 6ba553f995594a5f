import io
import json
import platform
import sys
from collections import Counter
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import fullstride.cli.doctor
from fullstride import __version__
from fullstride.cli.doctor import JaxDevice, abilities, devices, doctor, explained, jax_device, packages, report
from fullstride.extras import requirements
from tests.helpers.only_installed import brought_by, lines_of

CPU, HOPPER = JaxDevice("cpu"), JaxDevice("gpu", "9.0", "Some GPU")
TORCH_ROWS = ("jvp", "step (PyTorch)", "meanflow", "torch.compile")
GPU, PAGED, KERNELS = "JAX on a GPU", "llm, kernels=paged", "llm, kernels=token or chained"
BASE = brought_by(lines_of(""))
OPTIONAL = {extra: brought_by(lines_of(extra), deep=False) - BASE for extra in ("torch", "serve", "launch")}
INSTALLED = metadata.version


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
        def version(name: str) -> str:
            if name in packages:
                raise metadata.PackageNotFoundError(name)
            return INSTALLED(name)

        monkeypatch.setattr(metadata, "version", version)
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
    assert all(package in report for package in packages())
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
    assert {"jvp", "step (PyTorch)", "meanflow", "meanflow, precision=bf16", "torch.compile on the CPU"} <= runs
    for name in ("meanflow, device=cuda", "meanflow, device=mps", "torch.compile and Triton kernels on CUDA"):
        assert "use device=cpu" in str(found[name])
    assert found["meanflow, precision=tf32"] == "TF32 is CUDA's; use precision=fp32 or precision=bf16"


def test_without_torch_every_torch_row_says_how_to_get_it(absent):
    absent("torch")
    found = _obstacles()
    assert len(found) > 1
    for name in [name for name in found if name.startswith(TORCH_ROWS)]:
        assert found[name] == "torch not installed; run, from the root of a clone: pip install '.[torch]'"
    assert [name for name, _ in devices(None)] == ["CPU"]
    assert "not installed" in _report()


def test_a_torch_that_does_not_import_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert _obstacles()["jvp"] == "torch cannot be imported; reinstall it"


def test_a_torch_whose_libraries_are_gone_is_said(monkeypatch, tmp_path):
    """PyTorch opens CUDA's libraries itself, and lets the linker's error through, which is no ImportError."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    assert _obstacles()["jvp"] == "torch cannot be imported; reinstall it"
    assert [name for name, _ in devices(CPU)] == ["CPU", "JAX"]


def test_without_jax_its_areas_name_what_is_missing(absent):
    absent("jax", "equinox", "optax")
    assert jax_device() is None
    found = _obstacles(None)
    extras = {
        "step (JAX)": "jax",
        "bert": "jax",
        "llm generate": "llm",
        "llm serve": "serve",
        GPU: "jax",
        PAGED: "llm",
        KERNELS: "llm",
    }
    for row, extra in extras.items():
        assert (
            found[row] == f"equinox, jax, optax not installed; run, from the root of a clone: pip install '.[{extra}]'"
        )


@pytest.mark.parametrize(
    ("package", "rows"),
    [
        ("pillow", {"meanflow"}),
        ("tokenizers", {"bert", "llm generate", "llm serve", PAGED, KERNELS}),
        ("llguidance", {"llm generate", "llm serve", PAGED, KERNELS}),
        ("uvicorn", {"llm serve"}),
        ("submitit", {"launch slurm"}),
        ("modal", {"launch modal"}),
    ],
)
def test_what_an_area_needs_is_missing_there_alone(absent, package, rows):
    before = _obstacles(HOPPER)
    absent(package)
    found = _obstacles(HOPPER)
    changed = {
        name.partition(", device")[0].partition(", precision")[0] for name in found if found[name] != before[name]
    }
    assert changed == rows
    assert all(str(found[name]).startswith(f"{package} not installed; ") for name in rows)


def test_a_package_that_several_areas_lack_is_said_once_for_each_framework(absent):
    absent(*set().union(*OPTIONAL.values()))
    lists = [why.partition(" not installed")[0] for _, why in explained(abilities(None)) if " not installed" in why]
    named = Counter(name for names in lists for name in names.rpartition("also ")[2].split(", "))
    assert named == Counter(name for names in OPTIONAL.values() for name in names)


def test_a_row_refers_to_the_earlier_one_that_lacks_the_most_of_what_it_does(absent):
    absent("jax", "tokenizers", "llguidance", "uvicorn")
    said = dict(explained(abilities(None)))
    assert said["step (JAX)"].startswith("jax not installed; ")
    assert said["bert"].startswith("see step (JAX); also tokenizers not installed; ")
    assert said["llm generate"].startswith("see bert; also llguidance not installed; ")
    assert said["llm serve"] == (
        "see llm generate; also uvicorn not installed; run, from the root of a clone: pip install '.[serve]'"
    )
    assert (said[GPU], said[PAGED], said[KERNELS]) == ("see step (JAX)", "see llm generate", "see llm generate")


def test_an_obstacle_that_is_no_package_is_said_once():
    said = dict(explained(abilities(CPU)))
    reasons = [why for why in said.values() if why and not why.startswith("see ")]
    assert len(reasons) == len(set(reasons))
    assert said["torch.compile and Triton kernels on CUDA"] == "see meanflow, device=cuda"
    assert said[PAGED] == said[KERNELS] == f"see {GPU}"


def test_the_report_for_programs_has_the_same_and_is_json(absent, monkeypatch):
    absent("uvicorn")
    monkeypatch.setattr(fullstride.cli.doctor, "jax_device", lambda: CPU)
    found = json.loads(json.dumps(report()))
    assert found["packages"] | {"torch": torch.__version__, "uvicorn": None} == found["packages"]
    assert found["devices"]["device=auto"] == "cpu"
    areas = {area.pop("name"): area for area in found["areas"]}
    assert areas["jvp"] == {"runs": True, "missing": [], "obstacle": None, "remedy": None}
    assert areas["llm serve"] == {
        "runs": False,
        "missing": ["uvicorn"],
        "obstacle": "uvicorn not installed",
        "remedy": "run, from the root of a clone: pip install '.[serve]'",
    }
    assert areas.keys() == _obstacles().keys()
    assert all(area["remedy"] for area in areas.values() if not area["runs"])


def test_a_package_that_is_only_imported_says_so(monkeypatch):
    def requires(name: str):
        raise metadata.PackageNotFoundError(name)

    requirements.cache_clear()
    monkeypatch.setattr(metadata, "requires", requires)
    said = [why for _, why in explained(abilities(CPU))]
    requirements.cache_clear()
    assert "fullstride is imported but not installed" in said[0]
    assert set(said[1:]) == {"see jvp"}


def test_what_jax_takes_is_asked_of_jax(monkeypatch):
    assert jax_device() == JaxDevice("cpu", "", "cpu")
    monkeypatch.setenv("JAX_PLATFORMS", "no-such-platform")
    assert jax_device() is None
    assert "jax finds no device; its error is shown by" in str(_obstacles(None)[GPU])


@pytest.mark.parametrize(("visible", "told"), [(0, "no GPU is visible"), (1, "pip install 'jax[cuda13]'")])
def test_a_jax_without_a_gpu_is_told_apart_from_a_machine_without_one(visible, told, monkeypatch):
    monkeypatch.setattr(fullstride.cli.doctor, "count_gpus", lambda: visible)
    found = _obstacles(CPU)
    assert found["bert"] is None
    assert found["llm generate"] is None
    for name in (GPU, PAGED, KERNELS):
        assert told in str(found[name])


@pytest.mark.parametrize(
    ("capability", "running"),
    [("7.5", {GPU}), ("8.0", {GPU, PAGED}), ("9.0", {GPU, PAGED, KERNELS}), ("12.0", {GPU, PAGED})],
)
def test_the_engines_kernels_need_the_gpu_that_they_were_made_for(capability, running):
    found = _obstacles(JaxDevice("gpu", capability, "Some GPU"))
    assert {name for name in (GPU, PAGED, KERNELS) if found[name] is None} == running
    for name in {PAGED, KERNELS} - running:
        assert f"not for {capability}; use --kernels auto" in str(found[name])


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
def test_triton_needs_its_package_beside_a_gpu(gpu, absent, installed):
    gpu(9, 0)
    if not installed:
        absent("triton")
    obstacle = _obstacles()["torch.compile and Triton kernels on CUDA"]
    assert obstacle == (None if installed else "triton not installed; run: pip install triton")


def test_compiling_on_the_cpu_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    obstacle = _obstacles()["torch.compile on the CPU"]
    assert obstacle == "no C++ compiler no-such-compiler; install one (apt install g++) or set CXX"
