"""How byte-level tokenizers cut a text into words, which a GGUF file has by a name alone."""

from typing import NamedTuple

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def plain_words(digits: str) -> str:
    """Return the regular expression of Qwen2's and Llama 3's words; `digits` counts those that go together."""
    return (
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def cased_words(digits: str, contractions: bool) -> str:
    """Return that of GPT-4o's and Tekken's words, which begin anew at a capital; contractions may end one."""
    mark, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    end = f"{CONTRACTIONS}?" if contractions else ""
    return (
        rf"{mark}{upper}*{lower}+{end}|{mark}{upper}+{lower}*{end}|\p{{N}}{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


class PreTokenizer(NamedTuple):
    """Pre-tokenizer of a byte-level tokenizer in a GGUF file; by default GPT-2's.

    Attributes:
        words: regular expression of its words, if it has one.
        single_digits: whether each digit is a word of its own, with GPT-2's other rules.
        ignore_merges: whether a word of the vocabulary is one token, whatever the merges say.
        begins: whether a text begins with the begin-of-text token, unless the file says otherwise.
        composed: whether a text is first normalized to Unicode's composed form (NFC).

    """

    words: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    begins: bool = False
    composed: bool = False
