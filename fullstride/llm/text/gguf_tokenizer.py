"""Tokenizer in a GGUF's metadata, rebuilt with the `tokenizers` library."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from fullstride.errors import ConfigError, one_line
from fullstride.llm.families import FAMILIES, PreTokenizer
from fullstride.llm.text.chat_template import ChatTemplate
from fullstride.llm.text.tokenizer import Tokenizer

# Token types of the format.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Besides the end token, these end a turn or a text in one model or other; llama.cpp stops at them, too.
ENDS = frozenset(mark for family in FAMILIES.values() for mark in family.ends)
# Each by the name that llama.cpp gives it.
PRE = {"gpt-2": PreTokenizer(), **{name: words for family in FAMILIES.values() for name, words in family.words.items()}}


def read_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Read the tokenizer of a GGUF, with its chat template.

    Raises:
        ConfigError: if there is none, it is damaged, or of a kind that is not supported.

    """
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if "tokenizer" in key}
    if own.get("model") not in tuple(MODELS) or not isinstance(own.get("tokens"), list):
        expected = ", ".join(MODELS)
        raise ConfigError(f"{path}: tokenizer.ggml.model={own.get('model')}: expected one of {expected}, with tokens")
    own.setdefault("token_type", [NORMAL] * len(own["tokens"]))
    try:
        return _build(path, own)
    except ConfigError:
        raise
    except Exception as error:  # what `tokenizers` raises has no class of its own
        raise ConfigError(f"{path}: its tokenizer is damaged: {one_line(error)}") from error


def _build(path: Path, own: Mapping[str, Any]) -> Tokenizer:
    backend, tokens = MODELS[own["model"]](path, own), own["tokens"]
    typed = zip(tokens, own["token_type"], strict=True)
    marks = [(text, kind == CONTROL) for text, kind in typed if kind in (CONTROL, USER_DEFINED)]
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in marks])
    roles = {role: own[key] for role, key in ROLES.items() if own.get(key) is not None}
    bos = roles.get("bos_token")
    if bos is not None and own.get(
        "add_bos_token", PRE.get(str(own.get("pre")), PreTokenizer()).begins or own["model"] == "llama"
    ):
        first = [(tokens[bos], bos)]
        backend.post_processor = processors.TemplateProcessing(single=f"{tokens[bos]} $A", special_tokens=first)
    named, template = {role: tokens[token] for role, token in roles.items()}, own.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        eos=_ends(path, own),
        bos=bos,
        vocab_size=len(tokens),
        template=ChatTemplate(template, named, own.get("tokenizer.chat_template.tool_use")) if template else None,
    )


def _byte_level(path: Path, own: Mapping[str, Any]) -> Backend:
    pre, merges = own.get("pre"), own.get("merges")
    if pre not in PRE or merges is None:
        raise ConfigError(f"{path}: tokenizer.ggml.pre={pre}: expected one of {', '.join(PRE)}, with merges")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {text: token for token, text in enumerate(own["tokens"]) if own["token_type"][token] != UNUSED}
    rules = PRE[pre]
    backend = Backend(models.BPE(vocabulary, pairs, ignore_merges=rules.ignore_merges))
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if rules.single_digits else []
    if rules.words is not None:
        cuts = [pre_tokenizers.Split(Regex(rules.words), "isolated")]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.words is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    backend.decoder = decoders.ByteLevel()
    if rules.composed:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentence_piece(path: Path, own: Mapping[str, Any]) -> Backend:
    """SentencePiece's BPE, which merges the pair that makes the piece of the best score first."""
    tokens, scores = own["tokens"], own.get("scores")
    if scores is None:
        raise ConfigError(f"{path}: a tokenizer.ggml.model=llama needs tokenizer.ggml.scores")
    vocabulary = {text: token for token, text in enumerate(tokens) if own["token_type"][token] != UNUSED}
    unknown = tokens[own.get("unknown_token_id", 0)]
    pieces = [token for token, kind in enumerate(own["token_type"]) if kind == NORMAL]
    by_score = [tokens[token] for token in sorted(pieces, key=lambda token: -scores[token])]
    pairs = ((text[:cut], text[cut:]) for text in by_score for cut in range(1, len(text)))
    merges = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
    backend = Backend(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space = own.get("add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if space else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if space else [])])
    return backend


def _ends(path: Path, own: Mapping[str, Any]) -> tuple[int, ...]:
    named = {key: own[key] for role in ("eos", "eot", "eom") if own.get(key := f"{role}_token_id") is not None}
    for key, token in named.items():
        if not isinstance(token, int) or isinstance(token, bool):
            raise ConfigError(f"{path}: tokenizer.ggml.{key}={token!r:.80}: expected a token id")
    kinds = own["token_type"]
    marks = (token for token, text in enumerate(own["tokens"]) if kinds[token] == CONTROL and text in ENDS)
    return tuple(dict.fromkeys((*named.values(), *marks)))


MODELS: dict[str, Callable[[Path, Mapping[str, Any]], Backend]] = {"gpt2": _byte_level, "llama": _sentence_piece}
