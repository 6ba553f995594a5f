"""Files of a tokenizer in Hugging Face's layout."""

from pathlib import Path
from typing import Any

import tokenizers

from fullstride.assets.model_folder import read_json
from fullstride.errors import ConfigError, one_line
from fullstride.llm.text.chat_template import ChatTemplate
from fullstride.llm.text.tokenizer import Tokenizer

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_folder(folder: Path) -> Tokenizer:
    """Read a folder's tokenizer.json, with tokenizer_config.json and chat_template.jinja if present.

    Raises:
        ConfigError: if there is no tokenizer.json, or a file cannot be understood.

    """
    backend, file = _backend(folder / "tokenizer.json"), folder / "tokenizer_config.json"
    config = read_json(file)
    try:
        return _built(backend, folder, config)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = f"{type(error).__name__}: {one_line(error)}"
        message = f"{file}: its tokens or template do not have transformers' format ({reason})"
        raise ConfigError(message) from error


def _built(backend: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> Tokenizer:
    # Tokens that only tokenizer_config.json knows, under the ids that it gives them.
    for _, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            made = tokenizers.AddedToken(entry.pop("content"), **{k: v for k, v in entry.items() if k != "__type"})
            backend.add_tokens([made])
    special = {**read_json(folder / "special_tokens_map.json"), **config}
    tokens = {role: text for role in ROLES if (text := _text(special.get(role))) is not None}
    eos = backend.token_to_id(tokens.get("eos_token", ""))
    bos, template = backend.token_to_id(tokens.get("bos_token", "")), _template(folder, config, tokens)
    return Tokenizer(backend, eos=() if eos is None else (eos,), bos=bos, template=template)


def _backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise ConfigError(f"{file}: not found; a tokenizer is read from this file only (save it as a fast tokenizer)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # what `tokenizers` raises has no class of its own
        raise ConfigError(f"{file}: not a tokenizer ({one_line(error)})") from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise TypeError(f"a token is {text!r}, expected a text")
    return text


def _template(folder: Path, config: dict[str, Any], tokens: dict[str, str]) -> ChatTemplate | None:
    chosen = config.get("chat_template")
    named = {entry["name"]: entry["template"] for entry in chosen} if isinstance(chosen, list) else {"default": chosen}
    for name, file in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
        if (folder / file).is_file():
            named[name] = (folder / file).read_text(encoding="utf-8")
    text = named.get("default")
    return ChatTemplate(text, tokens, named.get("tool_use")) if text else None
