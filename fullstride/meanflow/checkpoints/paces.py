"""The averages of a run's weights, by decay and by relative width."""

from fullstride.errors import ConfigError
from fullstride.meanflow.config.schema import EmaConfig
from fullstride.step.torch import Pace, Power


def averages_of(config: EmaConfig) -> list[Pace]:
    """Every average that a run keeps; the first is what sampling and evaluation use."""
    return [*config.decays, *map(Power, config.widths)]


def chosen_average(config: EmaConfig, given: float | None, option: str = "--ema", of: str = "the run's") -> Pace:
    """The average of a decay or a relative width; the run's first if none is given.

    Args:
        config: which averages the run keeps.
        given: the decay or the relative width.
        option: what it was given by, for the message.
        of: whose averages they are, for the message.

    Raises:
        ConfigError: if the run has no such average.

    """
    found = averages_of(config)
    if given is None:
        return found[0]
    for pace in found:
        if given == (pace.width if isinstance(pace, Power) else pace):
            return pace
    raise ConfigError(f"{option} {given}: expected one of {', '.join(map(str, found))}, {of} averages")


def as_written(pace: Pace) -> float | str:
    """An average in JSON and in names of folders: its decay, or `power_0.05`."""
    return str(pace) if isinstance(pace, Power) else pace
