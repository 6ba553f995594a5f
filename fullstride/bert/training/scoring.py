"""`fullstride bert evaluate`: a trained model on held-out text."""

from pathlib import Path

from fullstride.bert.data.catalogue import held_out_of
from fullstride.bert.training.build import check_fits, evaluator_of, use_device
from fullstride.bert.training.evaluate import Scores
from fullstride.bert.training.overrides import apply, full_key, settings_of
from fullstride.bert.training.runs import trained
from fullstride.bert.training.settings import TrainSettings
from fullstride.errors import ConfigError

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
            f"{', '.join(unused)}: evaluate takes model and tokenizer of {folder} as they are; expected of "
            f"{', '.join(USED)}"
        )
    use_device(given.device)  # where it is scored, not where it was trained
    found = trained(folder)
    settings = settings_of(overrides, found.settings)
    own = not any(full_key(override) in TEXTS for override in overrides)
    held_out = held_out_of(settings.data, settings.evaluation.size, found.tokenizer, found.texts if own else None)
    check_fits(found.model.config, held_out.rows.vocabulary.size, settings.data.length, str(folder))
    return evaluator_of(settings, held_out)(found.model)
