"""The texts, the tokenizer and the rows that settings name."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from fullstride.bert.data import gcide, hugging_face, python_docs, text_files
from fullstride.bert.data.corpus import Corpus
from fullstride.bert.data.rows import TokenRows, rows_of
from fullstride.bert.data.tokenizer import minilm, read_tokenizer, trained_once
from fullstride.bert.training.settings import DataSettings
from fullstride.errors import ConfigError


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows that a model is scored on.

    Attributes:
        rows: rows of held-out texts.
        size: bytes of those texts in UTF-8.

    """

    rows: TokenRows
    size: int


@dataclass(frozen=True)
class Data:
    """Rows that a run is trained and scored on.

    Attributes:
        fingerprint: fingerprint of the training texts.
        train: rows of the training texts.

    """

    tokenizer: Tokenizer
    fingerprint: str
    train: TokenRows
    held_out: HeldOut


def corpus_of(settings: DataSettings) -> Corpus:
    """The texts.

    Raises:
        ConfigError: if they cannot be had.

    """
    path = settings.path
    if settings.name == "gcide":
        return gcide.load(Path(path).expanduser() if path else None)
    if settings.name == "text_files":
        return text_files.load(path, settings.separator)
    if settings.name == "hf_dataset":
        return hugging_face.load(path, settings.split, settings.column)
    if path:
        raise ConfigError(f"data.path={path}: data=python_docs reads this Python's own files; use data=text_files")
    return python_docs.load()


def tokenizer_of(settings: DataSettings, train: Corpus, own: Path | None = None) -> Tokenizer:
    """The tokenizer of a run: the one it has already (`own`), a named one, or one trained on its texts.

    Raises:
        ConfigError: if it cannot be had.

    """
    if own is not None:
        return read_tokenizer(own)
    if settings.tokenizer == "minilm":
        return minilm()
    if settings.tokenizer:
        return read_tokenizer(Path(settings.tokenizer).expanduser())
    return trained_once(list(train.entries), train.fingerprint, settings.vocab_size, lowercase=settings.lowercase)


def data_of(settings: DataSettings, evaluation_size: int, own: Path | None = None) -> Data:
    """The rows of a run.

    Args:
        settings: which texts, and how rows are made of them.
        evaluation_size: bytes of held-out texts; 0 for all.
        own: file or folder of the run's own tokenizer, if it has one already.

    Raises:
        ConfigError: if the texts or the tokenizer cannot be had, or there is no token.

    """
    train, held_out = corpus_of(settings).split(settings.holdout)
    tokenizer = tokenizer_of(settings, train, own)
    rows = _rows(settings, train, tokenizer, "to train on")
    return Data(tokenizer, train.fingerprint, rows, _held_out(settings, held_out, evaluation_size, tokenizer))


def held_out_of(
    settings: DataSettings, evaluation_size: int, tokenizer: Tokenizer, texts: str | None = None
) -> HeldOut:
    """The held-out rows alone, for a model that has its tokenizer.

    Args:
        settings: which texts, and how rows are made of them.
        evaluation_size: bytes of held-out texts; 0 for all.
        tokenizer: the model's tokenizer.
        texts: required fingerprint of the texts that are not held out; None for any.

    Raises:
        ConfigError: as `data_of`, or if the texts changed.

    """
    train, held_out = corpus_of(settings).split(settings.holdout)
    if texts not in (None, train.fingerprint):
        raise ConfigError(
            f"data={settings.name}: the texts changed since training and may overlap the training set; "
            "restore them, or name the texts to score with data=... or data.path=..."
        )
    return _held_out(settings, held_out, evaluation_size, tokenizer)


def _held_out(settings: DataSettings, texts: Corpus, size: int, tokenizer: Tokenizer) -> HeldOut:
    sample = texts.sample(size)
    return HeldOut(_rows(settings, sample, tokenizer, "held out"), sample.size())


def _rows(settings: DataSettings, texts: Corpus, tokenizer: Tokenizer, what: str) -> TokenRows:
    rows = rows_of(texts, tokenizer, settings.length, pack=settings.pack)
    if not rows.count():
        raise ConfigError(f"data={settings.name}: the texts {what} have no token; use other or more texts")
    return rows
