"""Checks of a configuration: each value by its field, then what the components say that excludes what."""

from fullstride.errors import one_of
from fullstride.meanflow.config import datasets, networks
from fullstride.meanflow.config.presets import OUTSIDE, PRESETS
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.metrics import inception
from fullstride.meanflow.objective import times
from fullstride.meanflow.objective.loss import loss_of
from fullstride.meanflow.objective.weighting import weighting_of
from fullstride.settings.fields import Conflict, check, refuse
from fullstride.settings.import_path import is_import_path

CONFLICTS = (
    Conflict(
        "resume overwrite",
        lambda c: c.resume and c.overwrite,
        "one of them; resume goes on, overwrite deletes the run",
    ),
    *networks.CONFLICTS,
    *datasets.CONFLICTS,
    *inception.CONFLICTS,
)


def validate(config: TrainConfig) -> None:
    """Check everything that is wrong whatever the machine and the data.

    Raises:
        ConfigError: for the first impossible value: its key, what was received, what is expected.

    """
    for group, choices in PRESETS.items():
        name = getattr(getattr(config, group), "name", "default")
        if not (group in OUTSIDE and is_import_path(name)):
            one_of(f"{group}.name", name, choices)
    check(config)
    chosen = (*weighting_of(config.loss.weighting).conflicts, *loss_of(config.loss).conflicts)
    refuse((*CONFLICTS, *chosen, *times.conflicts_of(config.loss)), config)
