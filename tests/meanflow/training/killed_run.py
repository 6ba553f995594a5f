"""Runs a training again and again, each time killed with SIGKILL, until it ends; run in a process of its own.

It forks every attempt from a process that has only imported, so that a real kill costs no new start of Python.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fullstride.meanflow.checkpoints import folder as checkpoint
from fullstride.meanflow.config.schema import DataConfig
from fullstride.meanflow.training.trainer import train
from tests.meanflow.training.test_trainer import config


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_while_saving(_: random.Random) -> None:
    """Killed with half a file written."""
    save = checkpoint.save_file

    def half(tensors: dict, path: Path) -> None:
        save(tensors, path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        _die()

    checkpoint.save_file = half


def _die_while_renaming(_: random.Random) -> None:
    """Killed with everything written under the temporary name."""
    checkpoint._flush = _die


def _die_while_removing(_: random.Random) -> None:
    """Killed with an old checkpoint hidden and not yet gone."""
    checkpoint.shutil.rmtree = _die


def _die_after_a_while(rng: random.Random) -> None:
    """Killed at any moment, by a timer that Python cannot hold up."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.05, 1.2))


DEATHS: list[Callable[[random.Random], None]] = [
    _die_after_a_while,
    _die_while_saving,
    _die_after_a_while,
    _die_while_renaming,
    _die_while_removing,
    _die_after_a_while,
]


def _attempt(folder: Path, death: Callable[[random.Random], None] | None, rng: random.Random) -> int:
    """The status of one forked attempt."""
    pid = os.fork()
    if pid == 0:
        if death is not None:
            death(rng)
        # Long enough to be killed again and again.
        train(config(folder, epochs=9, resume=True, keep=2, data=DataConfig(batch_size=223)))
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def main(folder: Path, seed: int) -> None:
    """Kill six attempts, then let one end."""
    torch.set_num_threads(1)
    rng, start = random.Random(seed), time.perf_counter()
    for death in DEATHS:
        status = _attempt(folder, death, rng)
        done = [p.name for p in (folder / "run").glob("checkpoints/step_*")]
        killed = os.WIFSIGNALED(status)
        sys.stdout.write(f"{time.perf_counter() - start:.1f} s: {death.__name__}, killed {killed}, {sorted(done)}\n")
    assert _attempt(folder, None, rng) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
