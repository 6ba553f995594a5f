"""`fullstride doctor`: what is installed, what the machine has, what it can run and why not the rest."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fullstride import __version__
from fullstride.device.select import cores, describe, resolve_device, unavailable
from fullstride.extras import area_of, how_to_install, requirements, version
from fullstride.launch.gpus import count_gpus

# What other packages bring, and much depends on.
BROUGHT = ("jaxlib", "triton")
UNKNOWN = "fullstride is imported but not installed, so its requirements are not known"

# In a process of its own, which holds no GPU's memory and may hang: JAX finds its devices once, and takes most of one.
_JAX_DEVICE = """
import jax
device = jax.devices()[0]
print(device.platform, getattr(device, "compute_capability", ""), device.device_kind, sep="|")
"""
PATIENCE = 60.0  # seconds


def imported_torch() -> ModuleType | None:
    """Return PyTorch, or None if it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError):  # OSError if a CUDA library is missing
        return None
    return torch


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):
        return "unknown"


@dataclass(frozen=True)
class JaxDevice:
    """Default device of JAX: its platform ("cpu", "gpu"), and for a GPU its compute capability and kind."""

    platform: str
    capability: str = ""
    kind: str = ""

    def __str__(self) -> str:
        """Return a short text, such as `gpu (NVIDIA H100, capability 9.0)`."""
        return f"{self.platform} ({self.kind}, capability {self.capability})" if self.capability else self.platform


def jax_device() -> JaxDevice | None:
    """Return JAX's first device; None if it is not installed, finds none or does not answer."""
    if version("jax") is None:
        return None
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    line = [sys.executable, "-c", _JAX_DEVICE]
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    return JaxDevice(*done.stdout.splitlines()[-1].split("|")) if done.returncode == 0 else None  # plugins may print


def devices(jax: JaxDevice | None) -> Iterator[tuple[str, str]]:
    """Return name and description of each device, and the default device of each framework."""
    yield "CPU", f"{platform.machine()}, {cores()} cores, {_memory()} RAM"
    if jax is not None:
        yield "JAX", str(jax)
    if (torch := imported_torch()) is None:
        return
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield f"CUDA {i}", f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, capability {gpu.major}.{gpu.minor}"
    if unavailable("mps") is None:
        yield "MPS", "Apple GPU, shares the RAM"
    yield "device=auto", describe(resolve_device("auto"))


@dataclass(frozen=True)
class AreaReport:
    """Report about one area.

    Attributes:
        name: area, with a device or a setting if these matter.
        obstacle: reason why it cannot run, a semicolon, and the remedy; None if it can.
        missing: packages that it needs and that are not installed.

    """

    name: str
    obstacle: str | None = None
    missing: tuple[str, ...] = ()

    @property
    def remedy(self) -> str | None:
        """Remedy of the obstacle."""
        return self.obstacle.partition("; ")[2] if self.obstacle else None

    def as_dict(self) -> dict[str, Any]:
        """Everything about it, for JSON."""
        return {
            "name": self.name,
            "runs": self.obstacle is None,
            "missing": list(self.missing),
            "obstacle": self.obstacle.partition("; ")[0] if self.obstacle else None,
            "remedy": self.remedy,
        }


def packages() -> dict[str, str | None]:
    """Return the installed version of each package that training and serving need, None if it is missing."""
    try:
        names = [need.name for need in requirements("torch", "serve")]
    except PackageNotFoundError:
        names = []
    return {name: version(name) for name in sorted({*names, *BROUGHT})}


def _ability(name: str, module: str, find: Callable[[], str | None] = lambda: None) -> AreaReport:
    """Report an area: its obstacle is missing packages, or else what `find` returns."""
    area = area_of(module)
    try:
        missing = tuple(area.missing())
    except PackageNotFoundError:
        return AreaReport(name, f"{UNKNOWN}; run, from the root of a clone: pip install -e .")
    if missing:
        return AreaReport(name, f"{', '.join(missing)} not installed; {how_to_install(area.extra)}", missing)
    if area.extra == "torch" and imported_torch() is None:
        return AreaReport(name, "torch cannot be imported; reinstall it")
    return AreaReport(name, find())


def _no_compiler() -> str | None:
    default = "clang++" if sys.platform == "darwin" else "g++"
    name = os.environ.get("CXX", default)
    return None if shutil.which(name) else f"no C++ compiler {name}; install one (apt install g++) or set CXX"


def _no_triton() -> str | None:
    if reason := unavailable("cuda"):
        return reason
    return None if version("triton") else "triton not installed; run: pip install triton"


def _no_bf16() -> str | None:
    import torch

    if unavailable("cuda") is None and torch.cuda.get_device_capability() < (8, 0):
        return "this GPU is too old for it (capability 8.0 is needed); use precision=fp32"
    return None


def _no_tf32() -> str | None:
    return _no_bf16() if unavailable("cuda") is None else "TF32 is CUDA's; use precision=fp32 or precision=bf16"


def _no_jax_gpu(jax: JaxDevice | None) -> str | None:
    if jax is None:
        return f"jax finds no device; its error is shown by: {sys.executable} -c 'import jax; jax.devices()'"
    if jax.platform == "gpu":
        return None
    if not count_gpus():
        return "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return "this jax is built without CUDA; run: pip install 'jax[cuda13]'"


def _no_kernels(jax: JaxDevice | None, name: str) -> str | None:
    if (obstacle := _no_jax_gpu(jax)) or jax is None:
        return obstacle
    # The engine first: it and the kernels import each other, and begin with it alone.
    from fullstride.llm import engine  # noqa: F401
    from fullstride.llm.kernels.cuda.sets import gpu_refusal

    reason = gpu_refusal(name, jax.capability)
    return reason and f"{reason}; use --kernels auto"


def abilities(jax: JaxDevice | None) -> list[AreaReport]:
    """List the areas that can run here, each with its obstacle if it cannot."""
    return [
        _ability("jvp", "fullstride.jvp"),
        _ability("step (PyTorch)", "fullstride.step.torch"),
        _ability("meanflow", "fullstride.meanflow"),
        _ability("meanflow, device=cuda", "fullstride.meanflow", lambda: unavailable("cuda")),
        _ability("meanflow, device=mps", "fullstride.meanflow", lambda: unavailable("mps")),
        _ability("meanflow, precision=tf32", "fullstride.meanflow", _no_tf32),
        _ability("meanflow, precision=bf16", "fullstride.meanflow", _no_bf16),
        _ability("torch.compile on the CPU", "fullstride.jvp", _no_compiler),
        _ability("torch.compile and Triton kernels on CUDA", "fullstride.jvp", _no_triton),
        _ability("step (JAX)", "fullstride.step.jax"),
        _ability("bert", "fullstride.bert"),
        _ability("llm generate", "fullstride.llm"),
        _ability("llm serve", "fullstride.llm.server"),
        _ability("JAX on a GPU", "fullstride.step.jax", partial(_no_jax_gpu, jax)),
        _ability("llm, kernels=paged", "fullstride.llm", partial(_no_kernels, jax, "paged")),
        _ability("llm, kernels=token or chained", "fullstride.llm", partial(_no_kernels, jax, "token")),
        _ability("launch slurm", "fullstride.launch.slurm"),
        _ability("launch modal", "fullstride.launch.modal"),
        _ability("launch skypilot", "fullstride.launch.skypilot"),
    ]


def explained(found: Sequence[AreaReport]) -> Iterator[tuple[str, str]]:
    """Return each ability's name and why it cannot run; a repeated reason refers to the earlier row."""
    for i, ability in enumerate(found):
        # Whatever is in the way of such another one is in the way of this one, too.
        earlier = [
            other
            for other in found[:i]
            if other.obstacle
            and (other.obstacle == ability.obstacle or (other.missing and set(other.missing) <= set(ability.missing)))
        ]
        known = max(earlier, key=lambda other: len(other.missing), default=None)
        if ability.obstacle is None or known is None:
            yield ability.name, ability.obstacle or ""
        elif known.obstacle == ability.obstacle or known.missing == ability.missing:
            yield ability.name, f"see {known.name}"
        else:
            more = ", ".join(name for name in ability.missing if name not in known.missing)
            yield ability.name, f"see {known.name}; also {more} not installed; {ability.remedy}"


def report() -> dict[str, Any]:
    """Return everything that the machine has and can run, for JSON."""
    jax = jax_device()
    return {
        "fullstride": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages(),
        "devices": dict(devices(jax)),
        "areas": [ability.as_dict() for ability in abilities(jax)],
    }


def doctor(console: Console | None = None) -> None:
    """Print the report."""
    console = console or Console()
    jax = jax_device()
    console.print(f"fullstride {__version__}, Python {platform.python_version()}, {platform.platform()}")
    versions = Table("package", "version", title="Packages", title_justify="left")
    for package, found in packages().items():
        versions.add_row(package, found or "[dim]not installed[/dim]")
    machine = Table("device", "what it is", title="Devices", title_justify="left")
    for row in devices(jax):
        machine.add_row(*row)
    table = Table("to run", "here", title="What runs", title_justify="left")
    table.add_column("why not, and the remedy", overflow="fold")
    for name, obstacle in explained(abilities(jax)):
        table.add_row(name, "no" if obstacle else "yes", escape(obstacle))
    for part in (versions, machine, table):
        console.print(part)
