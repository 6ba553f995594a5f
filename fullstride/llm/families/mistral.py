"""Mistral, whose older models see a window of tokens."""

from typing import Any

from fullstride.llm.families.family import Family, FileSettings, all_windows
from fullstride.llm.families.words import PreTokenizer, cased_words


def layers(settings: FileSettings) -> dict[str, Any]:
    """Return what `sliding_window` says."""
    return {"windows": all_windows(settings)}


FAMILY = Family(
    layers=layers,
    words={"tekken": PreTokenizer(cased_words("", contractions=False), ignore_merges=True, begins=True)},
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
