"""`TrainStep`: an optimizer step as one launch, from the loss and its derivative to the averages of the weights.

It knows nothing of a workload: a loss is any function of a module and a batch.
"""

from fullstride.step.torch.averages import Averages
from fullstride.step.torch.backends import BACKENDS
from fullstride.step.torch.joining import joined
from fullstride.step.torch.late import Late
from fullstride.step.torch.prefetch import prefetch
from fullstride.step.torch.processes import ALONE, Processes
from fullstride.step.torch.schedules import constant, cosine, cosine_of, warmed_up
from fullstride.step.torch.shards import Shards
from fullstride.step.torch.to_host import Sent, to_host
from fullstride.step.torch.train_step import TrainStep

__all__ = [
    "ALONE",
    "BACKENDS",
    "Averages",
    "Late",
    "Processes",
    "Sent",
    "Shards",
    "TrainStep",
    "constant",
    "cosine",
    "cosine_of",
    "joined",
    "prefetch",
    "to_host",
    "warmed_up",
]
