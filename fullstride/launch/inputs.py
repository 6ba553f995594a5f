"""What a command reads on another machine, and whether it is there."""

import posixpath

from fullstride.errors import ConfigError
from fullstride.launch.words import Words, value_of

# Settings that name files or folders, unless they are one of these names.
NAMED: dict[str, tuple[str, ...]] = {"data.path": (), "data.tokenizer": ("minilm",), "model.init": ()}


def check_inputs(words: Words, remedy: str) -> None:
    """Check that a command reads nothing of this machine, by paths that are relative to where it is given.

    Relative ones in `runs`, which is there, too, pass, and so does the name of a data set of Hugging Face.

    Args:
        words: the command.
        remedy: how such a folder comes to the other machine.

    Raises:
        ConfigError: for a setting that names what is not there.

    """
    for key, names in NAMED.items():
        path = value_of(words, key) or ""
        if not path or path in names or (key == "data.path" and value_of(words, "data") == "hf_dataset"):
            continue
        if not path.startswith("/") and posixpath.normpath(path).split("/")[0] != "runs":
            raise ConfigError(f"{key}={path}: a path of this machine is not there; {remedy}")
