"""Measure launches of the norms' kernels on this GPU, against a copy of as many bytes measured in the same run.

    python -m benchmarks.tuning.norms --jobs 16 --out norms.json            # every candidate
    python -m benchmarks.tuning.norms --jobs 16 --out norms.json --only bf16  # of one format
    python -m benchmarks.tuning.norms --jobs 16 --out norms.json --default  # only what the tables hold

Bytes are counted as activations read and written once: forward 4 (x, tx, y, ty), detached backward 3 (gy, x, dx), full
backward 6 (gy, gty, x, tx, dx, dtx). Each time is the median over replays of a CUDA graph that goes through several
sets of inputs, together far larger than the cache. Candidates are compiled beforehand, by `jobs` processes; each one
is checked against fp64 before it is timed. The best launches belong into `row_configs` and `group_configs`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import norms_candidates
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.cases.jvp.shapes import NORMS_TUNING
from fullstride.jvp.norms import group_configs, group_norm, naive, row_configs, rows
from fullstride.jvp.norms.closed_form import ROW_NORMS, Affine
from fullstride.jvp.norms.group_configs import GroupConfig, Size
from fullstride.jvp.norms.row_configs import RowConfig
from fullstride.measure.environment import environment

DEVICE = "cuda"
PASSES = {"forward": 4, "detached": 3, "full": 6}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CACHE_BYTES = 400_000_000
TOLERANCE = {"bf16": 2**-7, "fp32": 2e-5}


@dataclass(frozen=True)
class Case:
    """One norm at one size."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    work: str
    channels_last: bool = False
    act: str | None = None

    def bytes(self) -> int:
        """The activations' traffic."""
        return PASSES[self.work] * torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize

    def sets(self) -> int:
        """How many sets of inputs overflow the cache."""
        return max(2, min(32, CACHE_BYTES // self.bytes()))

    def draw(self) -> tuple[Any, ...]:
        """The arguments of the call: activations, parameters and, backward, the moments."""
        g, t = (self._activation() for _ in range(2))
        x, tx = (self._activation() for _ in range(2))
        size = (self.shape[0], self.shape[-1]) if self.op == "ada_layer_norm" else (self.shape[self._channel],)
        w, b, tw, tb = (torch.randn(size, device=DEVICE) for _ in range(4))
        if self.op != "ada_layer_norm" or self.work == "detached":
            tw = tb = None
        affine = Affine(w, None, tw) if self.op == "rms_norm" else Affine(w, b, tw, tb)
        groups, act = ((32,), (self.act,)) if self.op == "group_norm" else ((), ())
        norm = () if self.op == "group_norm" else (ROW_NORMS[self.op],)
        forward = (*norm, x, tx, *groups, affine, 1e-5, *act)
        if self.work == "forward":
            return forward
        moments = tuple(self.call(naive, "")(*forward)[2:])
        if self.work == "detached":
            t, tx = None, None
        return (*norm, g, t, x, tx, *groups, affine, moments, *act)

    @property
    def _channel(self) -> int:
        return 1 if self.op == "group_norm" else -1

    def _activation(self) -> Tensor:
        a = torch.randn(self.shape, device=DEVICE, dtype=DTYPES[self.dtype])
        return a.contiguous(memory_format=torch.channels_last) if self.channels_last else a

    def call(self, module: Any, part: str | None = None) -> Callable[..., Any]:
        """The function of a module that does the work, or that of another part of it."""
        part = ("" if self.work == "forward" else "_backward") if part is None else part
        return getattr(module, ("group_norm" if self.op == "group_norm" else "row_norm") + part)

    @property
    def module(self) -> Any:
        """Where the kernels are."""
        return group_norm if self.op == "group_norm" else rows

    def default(self) -> RowConfig | GroupConfig:
        """The table's launch."""
        if self.op != "group_norm":
            return row_configs.row_config(self.work, self.shape[-1], self.op == "ada_layer_norm")
        return group_configs.group_config(self.work, self.size())

    def size(self) -> Size:
        """A group norm's."""
        n, c, h, w = self.shape
        return Size(n, 32, c // 32, h * w, self.channels_last, DTYPES[self.dtype].itemsize, self.act is not None)

    def candidates(self) -> list[RowConfig | GroupConfig]:
        """Launches worth a measurement, the table's first."""
        if self.op == "group_norm":
            found = norms_candidates.groups(self.work, self.size())
        else:
            found = norms_candidates.rows(self.work, self.shape[-1], self.op == "ada_layer_norm")
        return list(dict.fromkeys([self.default(), *found]))


def cases(only: str) -> list[Case]:
    """U-Net and DiT sizes, those whose name holds each part of `only`."""
    found = [
        Case(shape.op, shape.size, dtype, work, shape.channels_last, shape.act)
        for work in PASSES
        for dtype in DTYPES
        for shape in NORMS_TUNING
        if dtype == "bf16" or shape.op != "group_norm" or shape.size[1] != 256
    ]
    return [case for case in found if all(part in str(case) for part in only.split(","))]


def exact(case: Case, given: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """The results in fp64."""
    return case.call(naive)(*pytree.tree_map_only(Tensor, Tensor.double, given))


def correct(case: Case, found: tuple[Tensor | None, ...], wanted: tuple[Tensor | None, ...]) -> bool:
    """Whether all results agree."""
    pairs = [(a.double(), b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    return all(((a - b).norm() / b.norm()).item() < TOLERANCE[case.dtype] for a, b in pairs)


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """Of one call: the median over replays of a graph of all of them, whose results stay apart."""
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(14):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    del kept
    return statistics.median(times[4:])


def copy_microseconds(size: int, sets: int) -> float:
    """Of a copy that reads and writes `size` bytes together."""
    pairs = [[torch.empty(size // 2, dtype=torch.uint8, device=DEVICE) for _ in range(2)] for _ in range(sets)]
    return microseconds([lambda a=a, b=b: a.copy_(b) for a, b in pairs])


def measure(case: Case, every: bool) -> list[dict[str, Any]]:
    """Each candidate's time, best first."""
    sets = [case.draw() for _ in range(case.sets())]
    copied, wanted, call = copy_microseconds(case.bytes(), case.sets()), exact(case, sets[0]), case.call(case.module)
    found = []
    for config in case.candidates() if every else [case.default()]:
        row = asdict(case) | {"config": asdict(config), "default": config == case.default(), "copy_us": copied}
        try:
            right = correct(case, call(*sets[0], config=config), wanted)
        except Exception as error:  # A launch that does not fit is a result too.
            found.append(row | {"error": f"{type(error).__name__}: {error}"[:200]})
            continue
        us = microseconds([partial(call, *given, config=config) for given in sets])
        found.append(row | {"correct": right, "us": us, "gbps": case.bytes() / us / 1e3, "of_copy": copied / us})
    return sorted(found, key=lambda row: row.get("us", torch.inf))


def line(case: Case, found: list[dict[str, Any]]) -> str:
    """The table's launch and the best one."""
    name = f"{case.op} {case.work} {case.dtype} {'x'.join(map(str, case.shape))} {case.act or ''}"
    parts = [f"{name}{' last' if case.channels_last else ''}".ljust(58), f"copy {found[0]['copy_us']:6.1f} us"]
    for title, row in (("table", next(r for r in found if r["default"])), ("best", found[0])):
        time = f"{row['us']:6.1f} us {row['gbps']:5.0f} GB/s {row['of_copy']:4.0%}" if "us" in row else row["error"]
        parts.append(f"{title} {time} {tuple(row['config'].values())}")
    return " | ".join([*parts, f"wrong or failed {sum(not r.get('correct', False) for r in found)}/{len(found)}"])


def compile_share(share: int, jobs: int, only: str, every: bool) -> None:
    """Launch every jobs-th candidate once, so that it lies compiled on the disk."""
    work = [(case, config) for case in cases(only) for config in (case.candidates() if every else [case.default()])]
    for case, config in work[share::jobs]:
        try:
            case.call(case.module)(*case.draw(), config=config)
        except Exception as error:
            sys.stderr.write(f"{case} {config}: {type(error).__name__}\n")


def main() -> None:
    """Compile, check, time, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name holds this, as bf16,group_norm,full")
    parser.add_argument("--default", action="store_true", help="only the launches of the tables")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        return compile_share(options.share, options.jobs, options.only, not options.default)
    shares = [
        [sys.executable, "-m", "benchmarks.tuning.norms", *sys.argv[1:], "--share", str(i)] for i in range(options.jobs)
    ]
    for process in [subprocess.Popen(command) for command in shares]:
        process.wait()
    large = 2**30 / copy_microseconds(2**30, 4) / 1e3
    sys.stdout.write(f"copy of 1 GiB: {large:.0f} GB/s\n")
    results = []
    for case in cases(options.only):
        rows_found = measure(case, not options.default)
        results += rows_found
        sys.stdout.write(line(case, rows_found) + "\n")
        sys.stdout.flush()
        report = {"environment": environment(), "copy_gbps": large, "cases": results}
        options.out.write_text(json.dumps(report, indent=1))
    return None


if __name__ == "__main__":
    main()
