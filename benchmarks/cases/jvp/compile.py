"""Kernels compiled before a bench by several processes at once: they meet in Triton's cache on the disk."""

import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks.cases.jvp.common import Setup
from benchmarks.harness.budget import say
from fullstride.jvp.implementation import chosen


def compile_ahead(setup: Setup, jobs: int, calls: Iterable[Callable[[], Any]]) -> None:
    """Make the calls in `jobs` processes, where that compiles anything; with less than 2, leave it to the bench."""
    if jobs >= 2 and chosen(setup.implementation, torch.empty(0, device=setup.device)) == "triton":
        start = time.monotonic()
        say(f"compiling, {jobs} at a time")
        in_processes(jobs, calls)
        say(f"compiled in {time.monotonic() - start:.0f} s")


def in_processes(jobs: int, calls: Iterable[Callable[[], Any]]) -> None:
    """Make the calls; what fails in one is no concern, since the bench makes the call again and says it."""
    # A process with a GPU cannot be forked.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.exception()
