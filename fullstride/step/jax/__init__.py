"""Equinox training steps whose dispatch costs what `jax.jit` costs on a flat list of buffers."""

from fullstride.step.jax.cached_jit import cached_filter_jit
from fullstride.step.jax.call_style import Optimizer, make_train_step
from fullstride.step.jax.loss import Mean
from fullstride.step.jax.metrics import Metrics
from fullstride.step.jax.partition_style import make_train_step_with_partition
from fullstride.step.jax.precision import LossScale, Precision
from fullstride.step.jax.retrace import RetraceWarning
from fullstride.step.jax.sharding import Sharding, data_parallel, fsdp
from fullstride.step.jax.state import State
from fullstride.step.jax.step_timing import Pace
from fullstride.step.jax.train_step import TrainStep

__all__ = [
    "LossScale",
    "Mean",
    "Metrics",
    "Optimizer",
    "Pace",
    "Precision",
    "RetraceWarning",
    "Sharding",
    "State",
    "TrainStep",
    "cached_filter_jit",
    "data_parallel",
    "fsdp",
    "make_train_step",
    "make_train_step_with_partition",
]
