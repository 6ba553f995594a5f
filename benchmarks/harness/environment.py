"""Environment of a result: machine, command and code."""

import itertools
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.code_digest import joined
from fullstride.measure.environment import environment as machine

BEGAN = time.monotonic()
# An absolute path, by itself, behind a key or in a list; and what its folders are written as.
ABSOLUTE = re.compile(r"(?:^|(?<=[=\[,]))/(?:[^,\]]*/)?([^/,\]]+)/*(?=$|[,\]])")
FOLDER = "PATH/"
# Environment variables that change what runs; what else begins so places it: addresses, folders, versions.
TUNING = re.compile(
    r"(XLA|JAX|NCCL|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON|CUBLAS|OMP|MKL)"
    r"_(?!(\w+_)?(VERSION|ADDRESS|IFNAME|HOST|HOSTID|PORT|DIR|PATH|FILE)(_\w+)?$)\w+"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|MODULE_LOADING)|NVIDIA_TF32_OVERRIDE"
)
# What CUDA takes of a list of them, up to the first that is none.
GPU = re.compile(r"\s*(\d+|GPU-[\w-]+)\s*")


def environment(others: Iterable[Mapping[str, str]] = ()) -> dict[str, Any]:
    """Return the package's `environment` with the command and the digests of the code.

    `others` are code digests of other processes that measured.
    """
    return machine() | {"command": command(), "code": joined(others)}


def seconds() -> float:
    """Return the time since this process began to measure, which is what repeating a result takes."""
    return round(time.monotonic() - BEGAN, 1)


def command() -> str | None:
    """Return the command line of `fullstride` or its benchmarks, for a shell; None for another program.

    With the environment variables that tune what it runs on, and torchrun where that began it. Absolute paths are
    `PATH/` and their last part, and there is no `--out`: neither says what was measured.
    """
    program = Path(sys.argv[0] if sys.argv else "")
    benchmark = program.parts[-2:] == ("benchmarks", "__main__.py")
    if not benchmark and program.name != "fullstride" and program.parts[-2:] != ("fullstride", "__main__.py"):
        return None
    words, given = [], iter(sys.argv[1:])
    for word in given:
        if word == "--out":
            next(given, None)
        elif not word.startswith("--out="):
            words.append(_placeless(word))
    launcher = _launcher()
    launcher = [*(launcher or ["python", "-m"]), "benchmarks"] if benchmark else [*launcher, "fullstride"]
    return " ".join([*_tuning(), shlex.join([*launcher, *words])])


def _tuning() -> list[str]:
    chosen = sorted(item for item in os.environ.items() if TUNING.fullmatch(item[0]))
    return [f"{name}={shlex.quote(_of_no_place(name, value))}" for name, value in chosen]


def _of_no_place(name: str, value: str) -> str:
    """Return an environment variable's value without machine-specific parts: no folders, and GPUs renumbered from 0."""
    if name == "CUDA_VISIBLE_DEVICES" and "MIG" not in value:  # which says that it was a part of one
        seen = itertools.takewhile(GPU.fullmatch, value.split(","))  # as CUDA reads it
        return ",".join(str(index) for index, _ in enumerate(seen))
    return " ".join(map(_placeless, value.split()))


def _placeless(word: str) -> str:
    """Return a word of a command without this machine's folders."""
    return ABSOLUTE.sub(rf"{FOLDER}\1", word)


def _launcher() -> list[str]:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []
    nodes, processes = (os.environ.get(name, "1") for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return ["torchrun", *([f"--nnodes={nodes}"] * (nodes != "1")), f"--nproc-per-node={processes}", "-m"]


def xla_flags() -> str:
    """Return XLA's flags that were set from outside, such as `gpu_enable_command_buffer=`, without dump folders."""
    given = [flag.removeprefix("--xla_") for flag in os.environ.get("XLA_FLAGS", "").split()]
    return " ".join(flag for flag in given if not flag.startswith("dump_"))


def machine_slug(device: str, found: dict[str, Any]) -> str:
    """Return a machine name for file names: `nvidia-h200`, or `amd-epyc-2-cores` for a CPU."""
    gpu = found["gpu"]
    name = gpu["name"] if device == "cuda" and gpu else f"{found['cpu']} {found['cores']} cores"
    return slug(re.sub(r"\((r|tm)\)|processor|cpu", "", name.lower()))


def slug(text: str) -> str:
    """Return a part of a file name: lower-case letters and digits, separated by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
