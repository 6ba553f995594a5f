"""Models of Hugging Face's hub, from its local cache, or fetched into it."""

import re
from pathlib import Path

from fullstride.assets.model_folder import INDEX, read_json
from fullstride.errors import ConfigError, one_line, shortened

# OWNER/NAME, or OWNER/NAME@REVISION: a branch, a tag or a commit.
NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*?)(?:@([\w./-]+))?")
# What a model's folder is read from; some have their weights again in other layouts.
WANTED, UNWANTED = ["*.json", "*.jinja", "*.safetensors"], ["*/*", "consolidated*"]
MOST_OF_A_REASON = 300


def is_name(source: str) -> bool:
    """Return whether this could be the name of a model of the hub."""
    return NAME.fullmatch(source) is not None and not source.endswith(".gguf")


def hub_folder(source: str) -> Path:
    """Return the folder of a model: that in the cache if all of it is there, else it is fetched.

    Args:
        source: OWNER/NAME, with @REVISION if it is not the main branch.

    Raises:
        ConfigError: if it is not in the cache, and cannot be fetched.

    """
    from huggingface_hub import snapshot_download

    found = NAME.fullmatch(source)
    assert found is not None
    asked = {"repo_id": found[1], "revision": found[2], "allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    try:
        folder = Path(snapshot_download(**asked, local_files_only=True))
        if _is_whole(folder):
            return folder
    except Exception:  # the library has one for each way of not being there
        pass
    try:
        folder = Path(snapshot_download(**asked))
    except Exception as error:  # of the network, the hub, or a full disk
        reason = shortened(one_line(error), MOST_OF_A_REASON)
        raise ConfigError(
            f"model={source}: no such file or folder, and not in Hugging Face's cache; fetching it failed: {reason}"
        ) from error
    if not (folder / "config.json").is_file():
        advice = f"of a GGUF repository, run hf download {found[1]} FILE --local-dir DIR, then give DIR/FILE"
        raise ConfigError(f"model={source}: the repository has no config.json: expected a model's folder; {advice}")
    return folder


def _is_whole(folder: Path) -> bool:
    """Return whether a cached folder has the files that a model is read from; a download may have been cut short."""
    index = folder / INDEX
    names = read_json(index).get("weight_map") if index.is_file() else None
    needed = set(names.values()) if isinstance(names, dict) else set()
    there = all((folder / name).is_file() for name in ("config.json", "tokenizer.json", *needed))
    return there and any(folder.glob("*.safetensors"))
