"""Substitute for processes on GPUs: runs their command lines one after the other in this process."""

import math
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.cli.app import app
from benchmarks.experiments.gpu_pool import Task
from benchmarks.harness.time_limit import Limit


def run_in_process(tasks: Sequence[Task], gpus: Sequence[str], logs: Path, limit: Limit) -> list[str]:
    for task in tasks:
        words = [*task.words, "--limit", f"{limit.seconds:g}"] if limit.seconds < math.inf else list(task.words)
        assert words[0] == "benchmarks"
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, done.output
    return []
