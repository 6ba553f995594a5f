"""A run of which one process fails in its fourth step, the first time; started by torchrun, or with a rank."""

import os
import sys
from pathlib import Path

from torch import Tensor

from fullstride.meanflow.training import trainer
from fullstride.process import torchrun as launched
from tests.meanflow.training.together import settings


class Failing(trainer.Trainer):
    """Fails on process 1."""

    def _step(self, raw: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.state.position.step == 3 and self.processes.rank == 1 and not launched.restarts():
            raise ValueError("process 1 has had enough")
        return super()._step(raw, labels)


if __name__ == "__main__":
    trainer.Trainer = Failing
    folder, *rank = sys.argv[1:]
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), rank[0]) if rank else {}
    trainer.train(settings(Path(folder)))
