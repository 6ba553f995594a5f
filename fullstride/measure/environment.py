"""Environment of a measurement: machine, versions, commit, date."""

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fullstride.device.select import cores
from fullstride.extras import version

PACKAGES = ("fullstride", "torch", "triton", "numpy", "jax", "jaxlib", "equinox", "optax", "jvp-flash-attention")
# For a copy of the tree without its history.
COMMIT_VARIABLE = "FULLSTRIDE_COMMIT"


def _output(*command: str) -> str | None:
    """Return a command's output, run in the package's folder; None if it is missing or fails."""
    root = Path(__file__).parents[1]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _commit() -> dict[str, Any]:
    if given := os.environ.get(COMMIT_VARIABLE):
        return {"commit": given, "dirty": None}
    # Installed into an environment that lies in another project's repository, the commit would be that project's.
    if _output("git", "rev-parse", "--show-prefix") != "fullstride/":
        return {"commit": None, "dirty": None}
    # New modules count like changed ones; result files next to the package do not.
    changes = _output("git", "status", "--porcelain", "--", ".", "../benchmarks/**/*.py")
    return {"commit": _output("git", "rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.is_file() and (found := re.search(r"model name\s*: (.+)", info.read_text())):
        return found[1].strip()
    return platform.processor() or platform.machine()


def _gpu() -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return _jax_gpu()
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str | None:
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.partition("\n")[0] if found else None


def _jax_gpu() -> dict[str, Any] | None:
    jax = sys.modules.get("jax")
    if jax is None or jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    return {
        "name": device.device_kind,
        # Memory that JAX may allocate.
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "cuda": device.client.platform_version,
        "driver": _driver(),
    }


def environment() -> dict[str, Any]:
    """Return everything that a reader needs to reproduce or question a number; imports no framework itself."""
    torch = sys.modules.get("torch")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **_commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads() if torch else None,
        "gpu": _gpu(),
        "versions": {name: found for name in PACKAGES if (found := version(name))},
    }
