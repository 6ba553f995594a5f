"""`fullstride doctor`: what is installed, what the machine has, what it can run and why not the rest."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from rich.console import Console
from rich.table import Table

from fullstride import __version__
from fullstride.bench.environment import version
from fullstride.device import cores, describe, resolve_device, unavailable
from fullstride.extras import how_to_install

PACKAGES = (
    "torch", "triton", "numpy", "scipy", "scikit-learn", "torchdiffeq", "safetensors", "hydra-core", "matplotlib",
    "jaxtyping", "jax", "jaxlib", "equinox", "optax", "transformers", "starlette", "uvicorn", "typer", "rich",
)  # fmt: skip
NEEDS = {
    "torch": (
        "torch", "hydra-core", "jaxtyping", "matplotlib", "safetensors", "scikit-learn", "scipy", "torchdiffeq",
    ),
    "jax": ("jax", "equinox", "jaxtyping", "optax"),
}  # fmt: skip


@dataclass(frozen=True)
class Ability:
    """Something to run, and why it cannot run here, with the remedy; None if it can."""

    name: str
    obstacle: str | None = None


def missing(extra: str) -> str | None:
    """Which packages of an extra are not installed, with the remedy; None if all are."""
    names = [name for name in NEEDS[extra] if version(name) is None]
    return f"{', '.join(names)} not installed; {how_to_install(extra)}" if names else None


def _torch() -> ModuleType | None:
    try:
        import torch
    except ImportError:
        return None
    return torch


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):
        return "unknown"


def devices() -> Iterator[tuple[str, str]]:
    """Name and description of each device."""
    yield "CPU", f"{platform.machine()}, {cores()} cores, {_memory()} RAM"
    if (torch := _torch()) is None:
        return
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield f"CUDA {i}", f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, capability {gpu.major}.{gpu.minor}"
    if unavailable("mps") is None:
        yield "MPS", "Apple GPU, shares the RAM"
    yield "device=auto", describe(resolve_device("auto"))


def _no_compiler() -> str | None:
    default = "clang++" if sys.platform == "darwin" else "g++"
    name = os.environ.get("CXX", default)
    return None if shutil.which(name) else f"no C++ compiler {name}; install one (apt install g++) or set CXX"


def _no_triton() -> str | None:
    if reason := unavailable("cuda"):
        return f"Triton kernels need CUDA: {reason}"
    return None if version("triton") else "triton not installed; run: pip install triton"


def _no_bf16() -> str | None:
    import torch

    if unavailable("cuda") is None and torch.cuda.get_device_capability() < (8, 0):
        return "this GPU is too old for it (capability 8.0 is needed); use precision=fp32"
    return None


def _no_tf32() -> str | None:
    return _no_bf16() if unavailable("cuda") is None else "TF32 is CUDA's; use precision=fp32 or precision=bf16"


def abilities() -> list[Ability]:
    """What there is to run, each with its obstacle here."""
    obstacle = missing("torch") or (None if _torch() else "torch does not import; reinstall it")
    rows = [
        ("meanflow, device=cpu", lambda: None),
        ("meanflow, device=cuda", lambda: unavailable("cuda")),
        ("meanflow, device=mps", lambda: unavailable("mps")),
        ("meanflow, precision=tf32", _no_tf32),
        ("meanflow, precision=bf16", _no_bf16),
        ("torch.compile on the CPU", _no_compiler),
        ("torch.compile and Triton kernels on CUDA", _no_triton),
    ]
    torch_rows = [Ability(name, obstacle or find()) for name, find in rows]
    return [*torch_rows, Ability("JAX areas", missing("jax"))]


def doctor(console: Console | None = None) -> None:
    """Print the report."""
    console = console or Console()
    console.print(f"fullstride {__version__}, Python {platform.python_version()}, {platform.platform()}")
    versions = Table("package", "version", title="Packages", title_justify="left")
    for package in PACKAGES:
        versions.add_row(package, version(package) or "[dim]not installed[/dim]")
    found = Table("device", "what it is", title="Devices", title_justify="left")
    for row in devices():
        found.add_row(*row)
    table = Table("to run", "here", title="What runs", title_justify="left")
    table.add_column("why not, and the remedy", overflow="fold")
    for ability in abilities():
        table.add_row(ability.name, "no" if ability.obstacle else "yes", (ability.obstacle or "").replace("[", "\\["))
    for part in (versions, found, table):
        console.print(part)
