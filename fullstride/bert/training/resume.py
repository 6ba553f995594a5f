"""A run that goes on: its own settings, what of them may change on the way, and a refusal of the rest."""

from dataclasses import asdict
from pathlib import Path

from fullstride.bert.training.overrides import apply
from fullstride.bert.training.runs import own_settings, own_sizes, steps_made
from fullstride.bert.training.settings import TrainSettings
from fullstride.errors import ConfigError
from fullstride.settings.overrides import flat

# How long, how often, where to, how a step runs; never what is learned, but for rounding and where the rate falls to.
FREE_KEYS = {
    "steps", "eval_every", "save_every", "keep", "log_every", "run_name", "output_dir", "resume", "overwrite", "device",
    "data.path", "evaluation.size", "evaluation.batch_size", "layout", "sharding", "model.attention",
}  # fmt: skip


def settings_to_train(overrides: list[str]) -> TrainSettings:
    """The settings of a run, not yet validated: with `resume=true` those it has in its folder, under the overrides.

    Raises:
        ConfigError: as `apply`; or if the folder's settings are those of another version.

    """
    given = TrainSettings()
    apply(overrides, given)
    own = own_settings(run_of(given)) if goes_on(given) else None
    if own is None:
        return given
    # The folder may have been moved, and a run that once replaced another must not replace itself.
    own.output_dir, own.run_name, own.overwrite = given.output_dir, given.run_name, False
    apply(overrides, own)
    return own


def run_of(settings: TrainSettings) -> Path:
    """The folder that the settings mean."""
    return Path(settings.output_dir) / settings.run_name


def refuse_other_recipe(settings: TrainSettings) -> None:
    """Refuse to go on with another recipe than that of the run's checkpoints, or to fewer steps than it has made.

    Without a checkpoint there is no recipe yet.

    Raises:
        ConfigError: naming every key that differs and matters, with both values; or both numbers of steps.

    """
    run = run_of(settings)
    own = own_settings(run) if goes_on(settings) and own_sizes(run) is not None else None
    if own is None:
        return
    old, new = dict(flat(asdict(own))), dict(flat(asdict(settings)))
    if differing := [key for key in old if old[key] != new[key] and key not in FREE_KEYS]:
        changes = ", ".join(f"{key}: {old[key]} -> {new[key]}" for key in differing)
        raise ConfigError(f"{run}: cannot resume with other settings ({changes}); use another run_name")
    if (made := steps_made(run) or 0) > settings.steps:
        raise ConfigError(f"steps={settings.steps}: {run} has made {made}; expected {made} or more")


def goes_on(settings: TrainSettings) -> bool:
    """Whether a run of that name is gone on with; one that is replaced leaves nothing, whatever `resume` says."""
    return settings.resume and not settings.overwrite
