"""Whole choices out of a stream's pieces, so that both ways of answering say the same."""

from typing import Any

# Values that stand for themselves: the latest one counts.
_LATEST = frozenset(("index", "finish_reason", "stop_reason", "role", "refusal", "id", "type", "name"))


def merge(whole: Any, piece: Any) -> Any:
    """Texts and lists are joined, dictionaries merged by key; None adds nothing. Lists are joined in place."""
    if whole is None or piece is None:
        return piece if whole is None else whole
    if isinstance(whole, dict):
        keys = dict.fromkeys([*whole, *piece])
        return {key: _merged(key, whole.get(key), piece.get(key)) for key in keys}
    whole += piece
    return whole


def _merged(key: str, whole: Any, piece: Any) -> Any:
    if key in _LATEST:
        return whole if piece is None else piece
    return merge(whole, piece)
