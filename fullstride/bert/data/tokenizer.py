"""Tokenizers, through the library of that name: WordPiece (arXiv:1810.04805, section 3), trained on a corpus or from a
file, and byte-level BPE, as RoBERTa and ModernBERT have it, from a file.
"""

import hashlib
import json
import string
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordPieceTrainer

from fullstride.assets.fetch import cache_folder, fetch
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import note, replace_file, write_best_effort

PAD, UNKNOWN, CLASS, SEPARATOR, MASK = SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# The same roles in RoBERTa's words.
ROBERTA_SPECIALS = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
# A WordPiece token that continues the word before it; a byte-level token that does not: it begins with a space.
INSIDE, SPACE = "##", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
# Characters that a trained WordPiece knows at most; the rest is unknown.
ALPHABET = 1000
FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
# Of `tokenizer_config.json`: what it is called here, and what it may be.
TREATMENT: dict[str, tuple[str, Any]] = {
    "do_lower_case": ("lowercase", bool),
    "strip_accents": ("strip_accents", bool | None),
    "tokenize_chinese_chars": ("chinese", bool),
}
# Part of what a trained tokenizer is remembered by: another one for another way to train.
VERSION = 1


def _equipped(tokenizer: Tokenizer, normalizer: BertNormalizer) -> Tokenizer:
    """The tokenizer with BERT's treatment of text before and after WordPiece."""
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder(prefix=INSIDE)
    return tokenizer


def _wordpiece(vocabulary: dict[str, int], normalizer: BertNormalizer) -> Tokenizer:
    tokenizer = _equipped(Tokenizer(WordPiece(vocabulary, unk_token=UNKNOWN)), normalizer)
    tokenizer.add_special_tokens(list(SPECIALS))
    return _templated(tokenizer)


def _templated(tokenizer: Tokenizer) -> Tokenizer:
    _, _, first, last, _ = specials_of(tokenizer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (first, last)],
    )
    return tokenizer


def specials_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """A tokenizer's own names of padding, the unknown, a text's beginning and end, and a hidden token."""
    known = tokenizer.get_vocab().keys()
    return ROBERTA_SPECIALS if known >= set(ROBERTA_SPECIALS) else SPECIALS


def continues_word(tokenizer: Tokenizer, token: str) -> bool:
    """Return whether a token that is not special continues the word before it."""
    if isinstance(tokenizer.model, WordPiece):
        return token.startswith(INSIDE)
    return not token.startswith(SPACE)


def trained(texts: list[str], vocab_size: int, *, lowercase: bool = True) -> Tokenizer:
    """A WordPiece of at most `vocab_size` tokens for these texts; the same for the same texts.

    Raises:
        ConfigError: if the texts' characters alone need more tokens.

    """
    normalizer = BertNormalizer(lowercase=lowercase)
    tokenizer = _equipped(Tokenizer(WordPiece(unk_token=UNKNOWN)), normalizer)
    first, inside = _alphabets(texts, normalizer)
    least = len(SPECIALS) + len(first) + len(inside)
    if vocab_size < least:
        raise ConfigError(
            f"vocab_size={vocab_size}: expected at least {least}, since the texts' characters alone need that many"
        )
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        # The library numbers continuations as it meets them, in an order that differs from process to process, and
        # breaks ties by number: named beforehand, their order is ours.
        special_tokens=[*SPECIALS, *inside],
        initial_alphabet=first,
        limit_alphabet=len(first),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wordpiece(tokenizer.get_vocab(), normalizer)


def _alphabets(texts: list[str], normalizer: BertNormalizer) -> tuple[list[str], list[str]]:
    """The characters that tokens are made of, the most frequent ones, at the start of a word and inside of one."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    found = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))[:ALPHABET]
    # Punctuation is what BERT makes a word of its own.
    inner = [c for c in found if c not in string.punctuation and not unicodedata.category(c).startswith("P")]
    return sorted(found), sorted(INSIDE + c for c in inner)


def trained_once(texts: list[str], fingerprint: str, vocab_size: int, *, lowercase: bool = True) -> Tokenizer:
    """Train as `trained`, cached by the texts' fingerprint; a damaged entry is trained again."""
    name = json.dumps([VERSION, fingerprint, vocab_size, lowercase])
    path = cache_folder() / "wordpiece" / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"
    if path.is_file():
        try:
            return read_tokenizer(path)
        except ConfigError as error:
            note(f"{error}; training it again")
    tokenizer = trained(texts, vocab_size, lowercase=lowercase)
    write_best_effort(path, tokenizer.to_str())
    return tokenizer


def minilm() -> Tokenizer:
    """The 30,522 lower-case tokens of BERT's own vocabulary, as MiniLM has them; fetched unless cached."""
    return from_vocabulary(fetch("minilm/vocab"))


def from_vocabulary(
    path: Path, *, lowercase: bool = True, strip_accents: bool | None = None, chinese: bool = True
) -> Tokenizer:
    """A WordPiece of a `vocab.txt`: one token a line.

    Args:
        path: path of the file.
        lowercase: whether case is dropped.
        strip_accents: whether accents are dropped; None if they are dropped with case.
        chinese: whether each Chinese character is a word.

    Raises:
        ConfigError: if the file cannot be read, or lacks a special token.

    """
    try:
        # Only a line feed ends a token: some vocabularies have U+2028 and the like as tokens of their own.
        tokens = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected a vocab.txt, one token a line") from None
    vocabulary = {token: i for i, token in enumerate(tokens)}
    _check_specials(vocabulary, path)
    normalizer = BertNormalizer(lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese)
    return _wordpiece(vocabulary, normalizer)


def read_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer from a `tokenizer.json`, a `vocab.txt`, or a folder of either; nothing is cut off or filled up.

    A `vocab.txt` is lower-case, without accents, unless a `tokenizer_config.json` next to it differs. Parts of a BERT
    tokenizer that a `tokenizer.json` lacks are added: special tokens, and those around a text.

    Raises:
        ConfigError: if there is none, or it is no WordPiece and no byte-level BPE with BERT's special tokens or
            RoBERTa's.

    """
    if path.is_dir():
        found = [path / name for name in (FILE, "vocab.txt") if (path / name).is_file()]
        if not found:
            raise ConfigError(f"{path}: no {FILE} or vocab.txt in this folder")
        path = found[0]
    if path.suffix == ".txt":
        return from_vocabulary(path, **_treatment(path.parent / CONFIG))
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{path}: cannot be read ({error}); expected a {FILE} or a vocab.txt") from None
    bytewise = isinstance(tokenizer.model, BPE) and isinstance(tokenizer.decoder, ByteLevel)
    if not bytewise and not isinstance(tokenizer.model, WordPiece):
        raise ConfigError(f"{path}: model {type(tokenizer.model).__name__}; expected WordPiece or byte-level BPE")
    specials = specials_of(tokenizer)
    _check_specials(tokenizer.get_vocab(), path, specials)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # What a tokenizer of somebody else's lacks for a text with [MASK] to be encoded and decoded; special tokens that it
    # knows keep their own treatment of the spaces around them.
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens([name for name in specials if name not in known])
    tokenizer.decoder = tokenizer.decoder or WordPieceDecoder(prefix=INSIDE)
    return tokenizer if tokenizer.post_processor else _templated(tokenizer)


def _treatment(config: Path) -> dict[str, Any]:
    """Read case, accents and Chinese for `from_vocabulary` from transformers' settings next to a `vocab.txt`."""
    if not config.is_file():
        return {}
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
        found = {theirs: value for theirs, value in settings.items() if theirs in TREATMENT}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{config}: cannot be read ({error}); expected a tokenizer's settings in JSON") from None
    for theirs, value in found.items():
        if not isinstance(value, TREATMENT[theirs][1]):
            raise ConfigError(f"{config}: {theirs} is {value!r}; expected true or false")
    return {TREATMENT[theirs][0]: value for theirs, value in found.items()}


def _check_specials(vocabulary: dict[str, int], path: Path, names: tuple[str, ...] = SPECIALS) -> None:
    if lacking := [name for name in names if name not in vocabulary]:
        raise ConfigError(f"{path}: no {', '.join(lacking)}; expected BERT's special tokens or RoBERTa's")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and the settings that transformers needs with it."""
    roles = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    names = dict(zip(roles, specials_of(tokenizer), strict=True))
    replace_file(folder / FILE, tokenizer.to_str(pretty=True))
    if not isinstance(tokenizer.model, WordPiece):
        plain = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        replace_file(folder / CONFIG, json.dumps(plain, indent=1) + "\n")
        return
    lowercase = bool(getattr(tokenizer.normalizer, "lowercase", True))
    settings: dict[str, Any] = {"tokenizer_class": "BertTokenizer", "do_lower_case": lowercase}
    settings["strip_accents"] = getattr(tokenizer.normalizer, "strip_accents", None)
    settings["tokenize_chinese_chars"] = bool(getattr(tokenizer.normalizer, "handle_chinese_chars", True))
    settings |= names
    tokens = {i: token for token, i in tokenizer.get_vocab().items()}
    # A number that no token has, as where a line came twice, needs its line: lines are counted.
    lines = [tokens.get(i, f"[unused line {i}]") for i in range(max(tokens) + 1)]
    replace_file(folder / "vocab.txt", "".join(f"{token}\n" for token in lines))
    replace_file(folder / CONFIG, json.dumps(settings, indent=1) + "\n")
