"""`data=hf_dataset`: a column of text of a Hugging Face data set, if the package `datasets` is installed."""

import importlib
from pathlib import Path

from fullstride.bert.data.corpus import Corpus
from fullstride.errors import ConfigError, one_line

# What `save_to_disk` leaves in a folder.
SAVED = ("state.json", "dataset_dict.json")


def load(path: str, split: str = "train", column: str = "text") -> Corpus:
    """One entry for each record.

    Args:
        path: a data set's name, with its configuration after a colon if it has several, as in
            `wikitext:wikitext-2-raw-v1`; a folder of files as `datasets.load_dataset` takes it; or what `save_to_disk`
            wrote.
        split: name of the split.
        column: name of the column of text.

    Raises:
        ConfigError: if the package is absent, the data set or its split cannot be loaded, or the column holds no text.

    """
    if not path:
        raise ConfigError("data=hf_dataset: expected data.path=NAME, NAME:CONFIGURATION or a folder")
    try:
        library = importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise ConfigError("data=hf_dataset: the package datasets is not installed; run: pip install datasets") from None
    try:
        if any((Path(path) / name).is_file() for name in SAVED):
            saved = library.load_from_disk(path)
            records = saved[split] if isinstance(saved, dict) else saved
        else:
            name, _, configuration = path.partition(":") if not Path(path).exists() else (path, "", "")
            records = library.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the library's errors are of every kind, its network's too
        reason = one_line(error)[:300]
        raise ConfigError(f"data.path={path}: datasets cannot load split {split} ({reason})") from None
    if column not in records.column_names:
        raise ConfigError(f"data.column={column}: expected one of {', '.join(records.column_names)}")
    texts = records[column]
    if wrong := [type(text).__name__ for text in texts if not isinstance(text, str | None)]:
        raise ConfigError(f"data.column={column}: holds {wrong[0]}; expected text")
    return Corpus("hf_dataset", tuple(text.strip() for text in texts if text and text.strip()))
