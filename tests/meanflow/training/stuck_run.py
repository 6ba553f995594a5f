"""Runs whose third step hangs, each in a process of its own, forked from one that has only imported.

Prints the exit code of each process as JSON: `asleep`, then `again`, which goes on with it; `first`, whose first step
alone takes longer than any other may; `memory`, whose step does not fit; `waits` and `sleeps`, of which one waits in a
collective for the other.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullstride.errors import OutOfMemory
from fullstride.meanflow.config.schema import WatchConfig
from fullstride.meanflow.training import trainer
from fullstride.process.exit_codes import OUT_OF_MEMORY
from fullstride.step.torch.body import Body
from tests.meanflow.training.test_trainer import config
from tests.meanflow.training.together import settings

WATCH = WatchConfig(first_step_minutes=5.0, step_minutes=4.0 / 60)


class Stuck(trainer.Trainer):
    """A trainer in trouble of the kind `name`."""

    name = ""

    def _step(self, raw: Tensor, labels: Tensor) -> dict[str, Tensor]:
        step = self.state.position.step
        if (step, self.name) in ((0, "first"), (2, "asleep"), (2, "sleeps")):
            time.sleep(60 if step else 5.5)
        if (step, self.name) == (2, "memory"):
            Body.forward = _too_large(Body.forward)
        return super()._step(raw, labels)


def _too_large(forward: Any) -> Any:
    def limited(body: Body, part: dict[str, Tensor]) -> Any:
        if len(part["raw"]) > 50:
            raise torch.OutOfMemoryError("no room")
        return forward(body, part)

    return limited


def _train(name: str, folder: Path, port: int) -> int:
    Stuck.name = name
    if name in ("waits", "sleeps"):
        given = {"RANK": name == "sleeps", "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {key: str(int(x) if isinstance(x, bool) else x) for key, x in given.items()}
        run = settings(folder / "together", watch=WATCH)
    else:
        run = config(folder / name.replace("again", "asleep"), watch=WATCH, resume=name == "again")
    try:
        trainer.train(run)
    except OutOfMemory:
        return OUT_OF_MEMORY
    return 0


def _fork(name: str, folder: Path, port: int = 0) -> int:
    if pid := os.fork():
        return pid
    os._exit(_train(name, folder, port))


def main(folder: Path) -> None:
    """Let all of them happen."""
    torch.set_num_threads(1)
    trainer.Trainer = Stuck
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    codes = {}
    for names in (("asleep", "waits", "sleeps"), ("again", "first", "memory")):
        pids = {name: _fork(name, folder, port) for name in names}
        codes |= {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in pids.items()}
    sys.stdout.write(json.dumps(codes) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
