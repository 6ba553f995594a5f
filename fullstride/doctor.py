"""`fullstride doctor`: what is installed, what the machine has, what it can run and why not the rest."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from rich.console import Console
from rich.table import Table

from fullstride import __version__
from fullstride.bench.environment import version
from fullstride.device import cores, describe, resolve_device, unavailable
from fullstride.extras import how_to_install
from fullstride.launch.gpus import count_gpus

PACKAGES = (
    "torch", "triton", "numpy", "scipy", "scikit-learn", "torchdiffeq", "safetensors", "hydra-core", "matplotlib",
    "jaxtyping", "jax", "jaxlib", "equinox", "optax", "transformers", "starlette", "uvicorn", "typer", "rich",
)  # fmt: skip
JAX = ("jax", "equinox", "jaxtyping", "optax", "orbax-checkpoint", "safetensors", "tokenizers")
NEEDS = {
    "torch": (
        "torch", "hydra-core", "jaxtyping", "jinja2", "matplotlib", "pillow", "safetensors", "scikit-learn", "scipy",
        "torchdiffeq",
    ),
    "jax": JAX,
    "serve": (*JAX, "fastapi", "httpx", "jinja2", "llguidance", "prometheus-client", "uvicorn"),
    "launch": ("modal", "packaging", "pyyaml", "submitit"),
}  # fmt: skip
# In a process of its own, which holds no GPU's memory and may hang: JAX finds its devices once, and takes most of one.
_JAX_DEVICE = """
import jax
device = jax.devices()[0]
print(device.platform, getattr(device, "compute_capability", ""), device.device_kind, sep="|")
"""
PATIENCE = 60.0  # seconds


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
    except (ImportError, OSError):  # the latter where a library of CUDA's is gone
        return None
    return torch


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):
        return "unknown"


@dataclass(frozen=True)
class JaxDevice:
    """What JAX computes on unless told: its platform ("cpu", "gpu"), and of a GPU its capability and what it is."""

    platform: str
    capability: str = ""
    kind: str = ""

    def __str__(self) -> str:
        """As in `gpu (NVIDIA H100, capability 9.0)`."""
        return f"{self.platform} ({self.kind}, capability {self.capability})" if self.capability else self.platform


def jax_device() -> JaxDevice | None:
    """The first that JAX finds; None where it is not installed, finds none or does not answer."""
    if missing("jax"):
        return None
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    line = [sys.executable, "-c", _JAX_DEVICE]
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    return JaxDevice(*done.stdout.splitlines()[-1].split("|")) if done.returncode == 0 else None  # plugins may print


def devices(jax: JaxDevice | None) -> Iterator[tuple[str, str]]:
    """Name and description of each device, and what each framework takes."""
    yield "CPU", f"{platform.machine()}, {cores()} cores, {_memory()} RAM"
    if jax is not None:
        yield "JAX", str(jax)
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


def _no_jax_gpu(jax: JaxDevice | None) -> str | None:
    if jax is None:
        return f"jax finds no device; see what this says: {sys.executable} -c 'import jax; jax.devices()'"
    if jax.platform == "gpu":
        return None
    if not count_gpus():
        return "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return "this jax is built without CUDA; run: pip install 'jax[cuda13]'"


def _no_kernels(jax: JaxDevice | None) -> str | None:
    if (obstacle := _no_jax_gpu(jax)) or jax is None:
        return obstacle
    from fullstride.llm.kernels.cuda.sets import CAPABILITY

    if jax.capability == CAPABILITY:
        return None
    return f"made for capability {CAPABILITY} (H100, H200), not for {jax.capability}; use --kernels plain"


def abilities(jax: JaxDevice | None) -> list[Ability]:
    """What there is to run, each with its obstacle here."""
    torch = missing("torch") or (None if _torch() else "torch does not import; reinstall it")
    rows = [
        ("meanflow, device=cpu", torch, lambda: None),
        ("meanflow, device=cuda", torch, lambda: unavailable("cuda")),
        ("meanflow, device=mps", torch, lambda: unavailable("mps")),
        ("meanflow, precision=tf32", torch, _no_tf32),
        ("meanflow, precision=bf16", torch, _no_bf16),
        ("torch.compile on the CPU", torch, _no_compiler),
        ("torch.compile and Triton kernels on CUDA", torch, _no_triton),
        ("bert", missing("jax"), lambda: None),
        ("llm generate, llm serve", missing("serve"), lambda: None),
        ("bert and llm on a GPU", missing("jax"), partial(_no_jax_gpu, jax)),
        ("llm, kernels=token, chained or paged", missing("serve"), partial(_no_kernels, jax)),
        ("launch --backend slurm, modal or skypilot", missing("launch"), lambda: None),
    ]
    return [Ability(name, obstacle or find()) for name, obstacle, find in rows]


def doctor(console: Console | None = None) -> None:
    """Print the report."""
    console, jax = console or Console(), jax_device()
    console.print(f"fullstride {__version__}, Python {platform.python_version()}, {platform.platform()}")
    versions = Table("package", "version", title="Packages", title_justify="left")
    for package in PACKAGES:
        versions.add_row(package, version(package) or "[dim]not installed[/dim]")
    found = Table("device", "what it is", title="Devices", title_justify="left")
    for row in devices(jax):
        found.add_row(*row)
    table = Table("to run", "here", title="What runs", title_justify="left")
    table.add_column("why not, and the remedy", overflow="fold")
    for ability in abilities(jax):
        table.add_row(ability.name, "no" if ability.obstacle else "yes", (ability.obstacle or "").replace("[", "\\["))
    for part in (versions, found, table):
        console.print(part)
