"""A process of the bench of several GPUs: it meets its team's others, compiles, waits for the word, and measures."""

import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.cases.meanflow.options import ScalingOptions, StepOptions, counts
from benchmarks.cases.meanflow.scaling_memory import Memory
from benchmarks.cases.meanflow.scaling_steps import Groups, Steps, groups_of
from benchmarks.cases.meanflow.step_setup import make_setup
from benchmarks.harness.budget import one_stream
from benchmarks.harness.process_pool import await_turn, share_cores
from fullstride.device import memory
from fullstride.meanflow.config.presets import MODELS
from fullstride.measure.roofline import Ceilings
from fullstride.step.torch import Processes, joined
from fullstride.step.torch.body import searched_convolutions


@dataclass(frozen=True)
class Job:
    """A set's: a network's steps at a ratio, or the memory of the largest network."""

    model: str
    ratio: float | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model}, memory" if self.ratio is None else f"{self.model}, ratio {self.ratio:.0%}"


def step_options(options: ScalingOptions, model: str) -> StepOptions:
    """Those of one network's setup."""
    # Convolutions are fastest in that order; a transformer has none.
    last = MODELS[model]().convolutional and options.device != "cpu"
    sizes = {"batch_size": options.batch_size, "full_step": True, "averages": options.averages}
    return StepOptions(options.device, options.precision, model, channels_last=last, seconds=float("inf"), **sizes)


def work(parent: Connection, given: dict[str, Any], job: Job, options: ScalingOptions, beside: int) -> None:
    """One process: join the others, compile, wait for the word, measure; the first one tells.

    Args:
        parent: says the machine's rates and the operations of a forward pass of one image; hears errors, and that all
            is compiled; says when it is this one's turn; then hears what is found.
        given: what torchrun would tell.
        job: what to measure.
        options: of the bench.
        beside: processes at once, that share the processor's cores.

    """
    os.environ |= {name: str(value) for name, value in given.items()}
    share_cores(beside)
    known = parent.recv()
    with joined(options.device, "nccl") as everyone:
        # How much memory there is does not depend on what gradients travel by.
        ways = options.transfers[:1] if job.ratio is None else options.transfers
        groups = groups_of(counts(everyone.size), options.device, ways)
        with one_stream(torch.device(options.device)), searched_convolutions():
            _measure(parent, job, options, known, everyone, groups)


def _measure(
    parent: Connection,
    job: Job,
    options: ScalingOptions,
    known: tuple[Ceilings, int],
    everyone: Processes,
    groups: Groups,
) -> None:
    device = torch.device(options.device)
    if job.ratio is None:
        bench = Memory(options, device, everyone)
    else:
        setup = make_setup(step_options(options, job.model), known)
        bench = Steps(options, setup, setup.loss(job.ratio, split="shared"), everyone)
        errors = bench.compile(groups)
        if everyone.leads:
            parent.send(errors)
    memory.release(device)  # what the gate took
    await_turn(parent)
    for row in bench.measure(groups):
        if everyone.leads:
            parent.send(row)
