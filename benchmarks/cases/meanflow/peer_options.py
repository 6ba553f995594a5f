"""Options of `python -m benchmarks meanflow-peer`."""

from dataclasses import dataclass, replace
from pathlib import Path

# A process's part of `cifar10_v1`, which eight make together, in the memory order that is faster.
RECIPE = {
    "preset": "cifar10_v1",
    "data.batch_size": "128",
    "gradient_accumulation_steps": "1",
    "channels_last": "true",
}
STEPS = 48  # the averages move every 16
PRECISIONS = {"cuda": ("bf16", "tf32"), "cpu": ("fp32",), "mps": ("fp32",)}
BACKENDS = {"cuda": "compile+graph", "cpu": "eager", "mps": "eager"}


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        official: a checkout of py-meanflow.
        settings: of a training, beside `RECIPE`, as `fullstride meanflow train` takes them.
        precisions: of our steps, none for a device's `PRECISIONS`; theirs are TF32 where there is any, as its main
            module sets it.
        backend: of our steps, None for a device's of `BACKENDS`; theirs are compiled if ours are.
        steps: timed of each.
        seconds: after which no other row begins.

    """

    official: Path
    device: str = "auto"
    settings: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    backend: str | None = None
    steps: int = STEPS
    seconds: float = 600.0

    def on(self, kind: str) -> "Options":
        """With what is usual on a kind of device, cuda, cpu or mps, where nothing is given.

        Raises:
            ConfigError: if the official code makes no step there.

        """
        from benchmarks.experiments.meanflow.theirs import (
            check_device,
        )  # loads PyTorch, which the command line need not

        check_device(self.official, kind)
        return replace(self, precisions=self.precisions or PRECISIONS[kind], backend=self.backend or BACKENDS[kind])

    @property
    def recipe(self) -> list[str]:
        """All settings of the training, as `key=value`; those that are given win."""
        given = {text.partition("=")[0] for text in self.settings}
        return [*(f"{key}={value}" for key, value in RECIPE.items() if key not in given), *self.settings]
