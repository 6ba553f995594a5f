"""A run that goes on: its own settings, what of them may change on the way, and a refusal of the rest."""

from dataclasses import asdict
from pathlib import Path

from fullstride.bert.training.overrides import apply
from fullstride.bert.training.runs import own_settings, own_sizes, steps_made
from fullstride.bert.training.settings import TrainSettings
from fullstride.errors import ConfigError
from fullstride.runs.folder import folder_of
from fullstride.runs.resume import FREE, changes, refuse

# Besides what may change in every workload: how long, how a step runs; never what is learned, but for rounding and
# where the rate falls to.
FREE_KEYS = FREE | {"device", "layout", "model.attention", "sharding", "steps"}


def settings_to_train(overrides: list[str]) -> TrainSettings:
    """The settings of a run, not yet validated: with `resume=true` those it has in its folder, under the overrides.

    Raises:
        ConfigError: as `apply`; or if the folder's settings are those of another version.

    """
    given = TrainSettings()
    apply(overrides, given)
    begun = begun_run(given)
    if begun is None or (own := own_settings(begun)) is None:
        return given
    # The folder may have been moved, and a run that once replaced another must not replace itself.
    own.output_dir, own.run_name, own.overwrite = given.output_dir, given.run_name, False
    apply(overrides, own)
    return own


def refuse_other_recipe(settings: TrainSettings) -> None:
    """Refuse to go on with another recipe than that of the run's checkpoints, or to fewer steps than it has made.

    Without a checkpoint there is no recipe yet.

    Raises:
        ConfigError: naming every key that differs and matters, with both values; or both numbers of steps.

    """
    run = begun_run(settings)
    if run is None or own_sizes(run) is None or (own := own_settings(run)) is None:
        return
    refuse(run, changes(asdict(own), asdict(settings), FREE_KEYS))
    if (made := steps_made(run) or 0) > settings.steps:
        raise ConfigError(f"steps={settings.steps}: {run} has made {made}; expected {made} or more")


def begun_run(settings: TrainSettings) -> Path | None:
    """The folder of a run that is gone on with; None for one that begins, or is replaced and so leaves nothing."""
    return folder_of(settings) if settings.resume and not settings.overwrite else None
