"""A run's folder: its settings and its trained model, and the settings that may change when it resumes."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
from tokenizers import Tokenizer

from fullstride.bert.data.catalogue import held_out_of
from fullstride.bert.data.tokenizer import read_tokenizer, save_tokenizer, specials_of
from fullstride.bert.model.bert import Bert
from fullstride.bert.model.config import BertConfig
from fullstride.bert.model.heads import Heads
from fullstride.bert.model.weights import WEIGHTS, has_weights, load, save_model, shapes_of
from fullstride.bert.training.build import check_fits, evaluator_of, step_of, use_device
from fullstride.bert.training.evaluate import Scores
from fullstride.bert.training.settings import TrainSettings, apply, full_key, settings_from, settings_of
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import read_best_effort
from fullstride.runs.folder import FREE, METRICS, check_kind, folder_of, refuse, setting_changes
from fullstride.step.jax.checkpoint import Checkpoints

CHECKPOINTS, SIZES, SETTINGS, HEADS = "checkpoints", "model.json", "config.json", "heads.safetensors"


@dataclass(frozen=True)
class TrainedBert:
    """A model with its tokenizer.

    Attributes:
        settings: settings of its run; None for a folder of weights.
        step: number of steps of its run.
        texts: fingerprint of its training texts; None for a folder of weights.

    """

    model: Bert
    tokenizer: Tokenizer
    settings: TrainSettings | None = None
    step: int = 0
    texts: str | None = None


def own_settings(run: Path) -> TrainSettings | None:
    """The settings of a run that has begun.

    Raises:
        ConfigError: where they are those of another workload or another version, or not whole.

    """
    path = run / SETTINGS
    check_kind(run, "bert")
    return settings_from(read_best_effort(path), path) if path.is_file() else None


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
    return BertConfig(**read_best_effort(run / SIZES))


def load_trained(folder: Path) -> TrainedBert:
    """The model of a run, with its averaged weights if it has any, or that of a folder of weights.

    Raises:
        ConfigError: if the folder is neither, a run of another workload or version, or one without a checkpoint.

    """
    if has_weights(folder):
        return TrainedBert(load(folder), read_tokenizer(folder))
    settings = own_settings(folder)
    if settings is None:
        raise ConfigError(f"{folder}: no run and no weights; expected a run's folder, or one with {WEIGHTS}")
    sizes = own_sizes(folder)
    if sizes is None:
        raise ConfigError(f"{folder}: this run has no checkpoint yet")
    settings.sharding = "none"
    with Checkpoints(folder / CHECKPOINTS) as checkpoints:
        state, extra = checkpoints.restore(step_of(settings, shapes_of(sizes)))
    # The same weights, without dropped attention weights, and the heads of the fine-tune that the run began with.
    heads = Heads((folder / HEADS).read_bytes()) if (folder / HEADS).is_file() else None
    shapes = shapes_of(replace(sizes, attention="auto", attention_dropout=0.0), heads)
    model = jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(state.ema_model or state.model))
    return TrainedBert(model, read_tokenizer(folder), settings, state.step, extra["data"])


def export(found: TrainedBert, out: Path) -> Path:
    """Write a model and its tokenizer as transformers reads them; returns the folder.

    Raises:
        ConfigError: if a run lives there: both have a config.json, and the run's would be lost.

    """
    if (out / CHECKPOINTS).exists() or (out / METRICS).exists():
        raise ConfigError(f"{out}: holds a run, and its {SETTINGS} would be replaced; give another folder")
    save_model(found.model, out, pad_token_id=found.tokenizer.token_to_id(specials_of(found.tokenizer)[0]))
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
    own.output_dir = given.output_dir
    own.run_name = given.run_name
    own.overwrite = False
    apply(overrides, own)
    return own


def refuse_other_recipe(settings: TrainSettings) -> None:
    """Refuse to resume with another recipe than that of the run's checkpoints, or to fewer steps than it has made.

    Without a checkpoint there is no recipe yet.

    Raises:
        ConfigError: naming every key that differs and matters, with both values; or both numbers of steps.

    """
    run = begun_run(settings)
    if run is None or own_sizes(run) is None or (own := own_settings(run)) is None:
        return
    refuse(run, setting_changes(asdict(own), asdict(settings), FREE_KEYS))
    if (made := steps_made(run) or 0) > settings.steps:
        raise ConfigError(f"steps={settings.steps}: {run} has made {made}; expected {made} or more")


def begun_run(settings: TrainSettings) -> Path | None:
    """The folder of a run that is resumed; None for one that begins or is replaced."""
    return folder_of(settings) if settings.resume and not settings.overwrite else None


# Of a run's settings, what a score depends on; the model and its tokenizer are the folder's.
TEXTS = ("data.name", "data.path", "data.separator", "data.split", "data.column", "data.holdout")
USED = (
    *TEXTS, "data.length", "data.mask_fraction", "data.whole_words", "data.pack", "evaluation.size",
    "evaluation.batch_size", "precision", "device",
)  # fmt: skip


def evaluate_command(folder: Path, overrides: list[str]) -> Scores:
    """The scores of a run on its own held-out text, or of weights, by settings such as `data=gcide`.

    Raises:
        ConfigError: if there is no such model, text or setting, a setting changes no score, the device is not there,
            or the model cannot read the rows.

    """
    given = TrainSettings()
    apply(overrides, given)
    if unused := [key for override in overrides if (key := full_key(override)) not in USED]:
        raise ConfigError(
            f"{', '.join(unused)}: evaluate takes model and tokenizer of {folder} as they are; expected some of "
            f"{', '.join(USED)}"
        )
    use_device(given.device)  # where it is scored, not where it was trained
    found = load_trained(folder)
    settings = settings_of(overrides, found.settings)
    own = not any(full_key(override) in TEXTS for override in overrides)
    held_out = held_out_of(settings.data, settings.evaluation.size, found.tokenizer, found.texts if own else None)
    check_fits(found.model.config, held_out.rows.vocabulary, settings.data.length, str(folder))
    return evaluator_of(settings, held_out)(found.model)
