"""Options of `python -m benchmarks train-step`; imports no framework."""

from dataclasses import dataclass
from pathlib import Path

from fullstride.errors import ConfigError, one_of

SECTIONS = ("host", "leaves", "static", "step")
MODELS = ("tiny", "mini", "small", "medium", "base", "large")
PRECISIONS = ("fp32", "bf16")
# Nothing dropped, by fused attention and by attention written out; dropped beside fused attention, and everywhere.
MODES = ("sdpa", "eager", "hidden", "dropout")
# The two ends, which are compared unless told; what lies between says which of their differences costs what.
USUAL = ("sdpa", "dropout")


@dataclass(frozen=True)
class Options:
    """Settings of a run.

    Attributes:
        sections: which tables.
        model: the tree's and the network's size.
        modes: networks of the section `step`.
        precision: that the network computes in.
        batch_size, length: rows, and tokens of a row.
        calls: timed calls of each way in the sections about the host.
        only: parts of the names of ways, or `=` and a whole name; all unless given.
        seconds: after them nothing more is begun.
        profile: a folder for a trace of each way of the section `step`; none is recorded without one.

    """

    sections: tuple[str, ...] = ("host",)
    model: str = "base"
    modes: tuple[str, ...] = USUAL
    precision: str = "fp32"
    batch_size: int = 8
    length: int = 128
    calls: int = 300
    only: tuple[str, ...] = ()
    seconds: float = 500.0
    profile: Path | None = None

    def __post_init__(self) -> None:
        """Check the names, and that what is to be traced is run.

        Raises:
            ConfigError: naming the option.

        """
        for section in self.sections:
            one_of("--section", section, SECTIONS)
        for mode in self.modes:
            one_of("--mode", mode, MODES)
        one_of("--model", self.model, MODELS)
        one_of("--precision", self.precision, PRECISIONS)
        if self.profile is not None and "step" not in self.sections:
            raise ConfigError(
                f"--profile {self.profile}: the real step alone is traced; received --section "
                f"{', '.join(self.sections)}, add --section step"
            )
