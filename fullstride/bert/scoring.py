"""`fullstride bert evaluate`: a trained model on held-out text."""

from pathlib import Path

from fullstride.bert.build import check_fits, evaluator_of
from fullstride.bert.data.catalogue import held_out_of
from fullstride.bert.evaluate import Scores
from fullstride.bert.overrides import settings_of
from fullstride.bert.runs import trained


def evaluate_command(folder: Path, overrides: list[str]) -> Scores:
    """The scores of a run on its own held-out text, or of weights, by settings such as `data=gcide`.

    Raises:
        ConfigError: if there is no such model, text or setting, or the model cannot read the rows.

    """
    found = trained(folder)
    settings = settings_of(overrides, found.settings)
    held_out = held_out_of(settings.data, settings.evaluation.size, found.tokenizer)
    check_fits(found.model.config, held_out.rows.vocabulary.size, settings.data.length, str(folder))
    return evaluator_of(settings, held_out)(found.model)
