"""Training by the official code (see `official_code`), watched."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.experiments.meanflow.official_code import Training, build, opened, run_epoch
from benchmarks.experiments.meanflow.watch import TimeUp, Watch
from fullstride.errors import Preempted
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.dataset import Dataset
from fullstride.meanflow.data.order import epoch_order

CHECKPOINT = "official.pt"


class Velocity(nn.Module):
    """Network of the official code, net(z, (t, t - r)), as u(z, r, t)."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, z: Tensor, r: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        """Return the average velocity."""
        return self.net(z, (t, t - r), None)


class Feed:
    """Endless loader of batches on the device in [0, 1], as the official loop expects; reports steps to the watch."""

    def __init__(self, config: TrainConfig, data: Dataset, training: Training, watch: Watch):
        """Copy the images to the device."""
        self.config, self.training, self.watch = config, training, watch
        self.images = (data.images(data.train, torch.arange(len(data.train))) / 2 + 0.5).to(config.device)
        self._before = training.made

    def __len__(self) -> int:
        """Number of earlier steps; the official loop numbers steps by place in the epoch and epoch length."""
        return max(1, self._before)

    @property
    def epoch(self) -> int:
        """Number of the one endless epoch that follows: 1 after resumed steps, else 0."""
        return min(1, self._before)

    def _orders(self) -> Iterator[Tensor]:
        """Yield batches of every epoch from the current one on."""
        count, size = len(self.images), self.config.data.batch_size
        epoch, skip = divmod(self._before, steps := count // size)
        while True:
            shape = {"steps": steps, "micro_batches": 1, "batch_size": size, "seed": self.config.seed}
            order = epoch_order(count, **shape, epoch=epoch, attempt=0)
            yield from order.reshape(steps, size)[skip:]
            epoch, skip = epoch + 1, 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        """One batch after the other; between two of them a step has been made; Preempted, KeyboardInterrupt after
        saving, if a stop signal came since the start was over; before that one ends the process at once.
        """
        training, stop, collecting = self.training, self.watch.stop, False
        with ExitStack() as until_the_end:
            for batch in self._orders():
                yield self.images[batch.to(self.images.device)], training.made
                training.made += 1
                if self.watch.clock.running and not collecting:
                    until_the_end.enter_context(stop)
                    collecting = True
                if collecting:
                    stop.arm()
                self.watch.after_step(training.made, lambda: Velocity(training.model.net_ema), self._save)
                if stop.signal is not None:
                    self._save()
                    message = f"stopped; saved {training.path}, the same command goes on"
                    raise Preempted(message) if stop.signal == signal.SIGTERM else KeyboardInterrupt(message)

    def _save(self) -> None:
        self.watch.keep_clock(self.training.made)
        self.training.save()


def train_official(config: TrainConfig, checkout: Path, watch: Watch) -> str:
    """Train by the official code until the watch ends it, and return the reason.

    ConfigError if the checkout cannot be used, or its network is another one. ValueError from its loop, if a loss is
    not finite. Preempted, KeyboardInterrupt after saving if a stop signal came.
    """
    code, args = opened(config, checkout)
    data = load_data(config.data)
    training = build(code, config, data, args, lambda: watch.share, watch.record.path.parent / CHECKPOINT)
    training.restore()
    watch.go_on_from(training.made)
    feed = Feed(config, data, training, watch)
    args.start_epoch = feed.epoch
    step = torch.compile(code["training.train_loop"].train_step, disable=not args.compile)
    try:
        run_epoch(code, training, step, feed, args)
    except TimeUp as over:
        return str(over)
    raise AssertionError("the official loop can only be ended by the watch")
