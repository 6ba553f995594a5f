"""`fullstride bert evaluate`: a trained model on held-out text."""

from pathlib import Path

from fullstride.bert.build import check_fits
from fullstride.bert.data.catalogue import data_of
from fullstride.bert.evaluate import Evaluator, Scores
from fullstride.bert.overrides import settings_of
from fullstride.bert.runs import trained
from fullstride.bert.tokenizer import FILE


def evaluate_command(folder: Path, overrides: list[str]) -> Scores:
    """The scores of a run on its own held-out text, or of weights, by settings such as `data=gcide`.

    Raises:
        ConfigError: if there is no such model, text or setting, or the model cannot read the rows.

    """
    found = trained(folder)
    settings = settings_of(overrides, found.settings)
    vocabulary = folder / FILE if (folder / FILE).is_file() else folder
    data = data_of(settings.data, settings.evaluation.size, vocabulary)
    check_fits(found.model.config, data.train.vocabulary.size, settings.data.length, str(folder))
    evaluator = Evaluator(
        data.held_out,
        data.held_out_bytes,
        batch_size=settings.evaluation.batch_size,
        fraction=settings.data.mask_fraction,
        whole_words=settings.data.whole_words,
        precision=settings.precision,
    )
    return evaluator(found.model)
