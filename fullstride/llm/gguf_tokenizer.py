"""The tokenizer in a GGUF's metadata, built anew with the `tokenizers` library."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from fullstride.errors import ConfigError
from fullstride.llm.chat_template import ChatTemplate
from fullstride.llm.tokenizer import Tokenizer

# Token types of the format.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Besides the end token, these end a turn or a text in one model or other; llama.cpp stops at them, too.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")
# How Qwen2 and Llama 3 cut a text into words (their tokenizer.json); they differ in how many digits go together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(WORDS.replace("DIGITS", digits)), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "qwen2": lambda: _words(""),
    "llama-bpe": lambda: _words("{1,3}"),
}


def read_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF carries, with its chat template.

    Raises:
        ConfigError: if there is none, or it is of a kind that is not supported.

    """
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if "tokenizer" in key}
    model, tokens = own.get("model"), own.get("tokens")
    if model not in MODELS or not isinstance(tokens, list):
        raise ConfigError(f"{path}: tokenizer.ggml.model={model}: expected one of {', '.join(MODELS)}, with its tokens")
    kinds = own.setdefault("token_type", [NORMAL] * len(tokens))
    backend = MODELS[model](path, own)
    for text, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(text, special=kind == CONTROL, normalized=False)])
    ids = {role: own.get(f"{role}_token_id") for role in ROLES}
    _add_first(backend, own, tokens, ids["bos"])
    named = {ROLES[role]: tokens[token] for role, token in ids.items() if token is not None}
    template = own.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        eos=_ends(own, tokens, kinds),
        bos=ids["bos"],
        template=ChatTemplate(template, named, own.get("tokenizer.chat_template.tool_use")) if template else None,
    )


def _byte_level(path: Path, own: Mapping[str, Any]) -> Backend:
    pre, merges = own.get("pre", "gpt-2"), own.get("merges")
    if pre not in PRE or merges is None:
        raise ConfigError(f"{path}: tokenizer.ggml.pre={pre}: expected one of {', '.join(PRE)}, with merges")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {text: token for token, text in enumerate(own["tokens"]) if own["token_type"][token] != UNUSED}
    backend = Backend(models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = PRE[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _add_first(backend: Backend, own: Mapping[str, Any], tokens: list[str], bos: int | None) -> None:
    """Put the first token before a text where the model wants it: Llama's always do unless the file says otherwise."""
    wanted = own.get("add_bos_token", own.get("pre") == "llama-bpe" or own["model"] == "llama")
    if wanted and bos is not None:
        text = tokens[bos]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{text} $A", pair=f"{text} $A {text} $B", special_tokens=[(text, bos)]
        )


def _ends(own: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> tuple[int, ...]:
    named = (own.get(f"{role}_token_id") for role in ("eos", "eot", "eom"))
    marks = (token for token, text in enumerate(tokens) if kinds[token] == CONTROL and text in ENDS)
    return tuple(dict.fromkeys((*(token for token in named if token is not None), *marks)))


MODELS: dict[str, Callable[[Path, Mapping[str, Any]], Backend]] = {"gpt2": _byte_level}
