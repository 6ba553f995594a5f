"""Where a number was measured: machine, versions, commit, date."""

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("fullstride", "torch", "triton", "numpy", "jax", "jaxlib", "equinox")
# For a copy of the tree without its history.
COMMIT_VARIABLE = "FULLSTRIDE_COMMIT"


def _versions() -> dict[str, str]:
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _git(*arguments: str) -> str | None:
    root = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _commit() -> dict[str, Any]:
    if given := os.environ.get(COMMIT_VARIABLE):
        return {"commit": given, "dirty": None}
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": _git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.is_file() and (found := re.search(r"model name\s*: (.+)", info.read_text())):
        return found[1].strip()
    return platform.processor() or platform.machine()


def _gpu() -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}


def environment() -> dict[str, Any]:
    """Everything that a reader needs to repeat or to doubt a number; imports no framework of its own accord."""
    torch = sys.modules.get("torch")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads() if torch else None,
        "gpu": _gpu(),
        "versions": _versions(),
    }


def machine_slug(device: str, found: dict[str, Any]) -> str:
    """A file name's worth of machine: `nvidia-h200`, or `amd-epyc-2-cores` for the CPU."""
    gpu = found["gpu"]
    name = gpu["name"] if device == "cuda" and gpu else f"{found['cpu']} {found['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|processor|cpu", "", name.lower())).strip("-")
