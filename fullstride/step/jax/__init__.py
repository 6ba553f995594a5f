"""Equinox training steps whose dispatch costs what `jax.jit` costs on a flat list of buffers."""

from fullstride.step.jax.cached_jit import cached_filter_jit
from fullstride.step.jax.metrics import Metrics
from fullstride.step.jax.pace import Pace
from fullstride.step.jax.precision import LossScale, Precision
from fullstride.step.jax.retrace import RetraceWarning
from fullstride.step.jax.state import State
from fullstride.step.jax.train_step import TrainStep

__all__ = ["LossScale", "Metrics", "Pace", "Precision", "RetraceWarning", "State", "TrainStep", "cached_filter_jit"]
