"""`TrainStep`: an optimizer step as one launch, from the loss and its derivative to the averages of the weights.

It knows nothing of a workload: a loss is any function of a module and a batch.
"""

import sys

from fullstride.renamed import add_old_names
from fullstride.step.torch.accumulation import Accumulation
from fullstride.step.torch.clipping import Clip
from fullstride.step.torch.distributed.join import join_processes
from fullstride.step.torch.distributed.processes import SINGLE, Processes
from fullstride.step.torch.distributed.shards import Shards
from fullstride.step.torch.ema.averages import Averages, Pace
from fullstride.step.torch.ema.power import Power
from fullstride.step.torch.explanation import Compilation, Explanation
from fullstride.step.torch.runners.backends import BACKENDS
from fullstride.step.torch.schedules import constant, cosine, cosine_of, warmed_up
from fullstride.step.torch.train_step import TrainStep
from fullstride.step.torch.transfer.prefetch import prefetch
from fullstride.step.torch.transfer.to_host import HostCopy, LateMetrics, to_host

__all__ = [
    "BACKENDS",
    "SINGLE",
    "Accumulation",
    "Averages",
    "Clip",
    "Compilation",
    "Explanation",
    "HostCopy",
    "LateMetrics",
    "Pace",
    "Power",
    "Processes",
    "Shards",
    "TrainStep",
    "constant",
    "cosine",
    "cosine_of",
    "join_processes",
    "prefetch",
    "to_host",
    "warmed_up",
]

add_old_names(sys.modules[__name__])
