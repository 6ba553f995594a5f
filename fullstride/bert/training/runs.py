"""A run's folder: what describes it, and what it has learned; which of its settings may change when it goes on."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from fullstride.bert.data.tokenizer import FILE, PAD, read_tokenizer, save_tokenizer
from fullstride.bert.model.bert import Bert
from fullstride.bert.model.config import BertConfig
from fullstride.bert.model.weights import WEIGHTS, load, save_model
from fullstride.bert.training.build import shapes_of, step_of, with_attention
from fullstride.bert.training.overrides import apply, settings_from
from fullstride.bert.training.settings import TrainSettings
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import read_kept, replace_file
from fullstride.runs.folder import METRICS, folder_of, write_config
from fullstride.runs.resume import FREE, changes, refuse
from fullstride.runs.workload import check_kind
from fullstride.step.jax.checkpoint import Checkpoints

CHECKPOINTS, SIZES, SETTINGS = "checkpoints", "model.json", "config.json"


@dataclass(frozen=True)
class Trained:
    """A model with its tokenizer.

    Attributes:
        settings: of the run that it is from; None for a folder of weights.
        step: how many steps that has made.
        texts: the fingerprint of those that it was trained on; None for a folder of weights.

    """

    model: Bert
    tokenizer: Tokenizer
    settings: TrainSettings | None = None
    step: int = 0
    texts: str | None = None


def describe_run(run: Path, settings: TrainSettings, config: BertConfig, tokenizer: Tokenizer) -> None:
    """Leave in a run's folder what it takes to go on with it, or to use what it learns."""
    save_tokenizer(tokenizer, run)
    replace_file(run / SIZES, json.dumps(asdict(config), indent=1) + "\n")
    write_config(run, settings)


def own_settings(run: Path) -> TrainSettings | None:
    """The settings of a run that has begun.

    Raises:
        ConfigError: where they are those of another workload or another version, or not whole.

    """
    path = run / SETTINGS
    check_kind(run, "bert")
    return settings_from(read_kept(path), path) if path.is_file() else None


def own_tokenizer(run: Path | None) -> Path | None:
    """The tokenizer of a run that has begun."""
    return run / FILE if run is not None and (run / FILE).is_file() else None


def steps_made(run: Path) -> int | None:
    """The steps of a run's newest checkpoint; None where there is none."""
    # One that was not finished has a longer name.
    return max((int(path.name) for path in (run / CHECKPOINTS).glob("*") if path.name.isdigit()), default=None)


def own_sizes(run: Path | None) -> BertConfig | None:
    """The model's sizes of a run that has a checkpoint."""
    if run is None or steps_made(run) is None:
        return None
    if not (run / SIZES).is_file():
        return None
    return BertConfig(**read_kept(run / SIZES))


def trained(folder: Path) -> Trained:
    """The model of a run, with its averaged weights where it keeps any, or that of a folder of weights.

    Raises:
        ConfigError: if the folder is neither, a run of another workload or version, or one without a checkpoint.

    """
    if (folder / WEIGHTS).is_file():
        return Trained(load(folder), read_tokenizer(folder))
    settings = own_settings(folder)
    if settings is None:
        raise ConfigError(f"{folder}: no run and no weights; expected a run's folder, or one with {WEIGHTS}")
    sizes = own_sizes(folder)
    if sizes is None:
        raise ConfigError(f"{folder}: this run has no checkpoint yet")
    settings.sharding = "none"
    with Checkpoints(folder / CHECKPOINTS) as checkpoints:
        state, extra = checkpoints.restore(step_of(settings, shapes_of(sizes)))
    model = with_attention(state.ema_model or state.model, "auto")
    return Trained(model, read_tokenizer(folder), settings, state.step, extra["data"])


def export(found: Trained, out: Path) -> Path:
    """Write a model and its tokenizer as transformers reads them; returns the folder.

    Raises:
        ConfigError: if a run lives there: both have a config.json, and the run's would be lost.

    """
    if (out / CHECKPOINTS).exists() or (out / METRICS).exists():
        raise ConfigError(f"{out}: a run lives there, whose {SETTINGS} would be replaced; give another folder")
    save_model(found.model, out, pad_token_id=found.tokenizer.token_to_id(PAD))
    save_tokenizer(found.tokenizer, out)
    return out


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
