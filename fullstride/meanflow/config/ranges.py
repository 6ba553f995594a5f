"""Whether a configuration can be: each value by its field, then what excludes what."""

from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config.conflicts import together
from fullstride.meanflow.config.presets import PRESETS
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.settings.fields import check


def validate(config: TrainConfig) -> None:
    """Check everything that is wrong whatever the machine and the data.

    Raises:
        ConfigError: for the first impossible value: its key, what was received, what is expected.

    """
    for group, choices in PRESETS.items():
        if "default" not in choices:
            one_of(f"{group}.name", getattr(config, group).name, choices)
    check(config)
    for received, wrong, expected in together(config):
        if wrong:
            raise ConfigError(f"{received}: expected {expected}")
