"""Stands in for processes on GPUs: the same command lines, one after the other, in this process."""

import math
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from fullstride.cli.app import app
from fullstride.launch.side_by_side import Task
from fullstride.process.deadline import Limit


def run_in_process(tasks: Sequence[Task], gpus: Sequence[str], logs: Path, limit: Limit) -> list[str]:
    for task in tasks:
        words = [*task.words, "--limit", f"{limit.seconds:g}"] if limit.seconds < math.inf else list(task.words)
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    return []
