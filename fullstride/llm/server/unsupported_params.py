"""Parameters of OpenAI's and vLLM's APIs that would change the answer, which this server does not do: refused, each
with what to do instead. A value that asks for nothing is taken.
"""

from typing import Any

_NOTHING = "this server does not support it"
# What to do instead, and values by which a client says that it does not want the thing, of which None is one unless
# there are none at all.
_KNOWN: dict[str, tuple[str, tuple[Any, ...] | None]] = {
    "allowed_token_ids": ("use structured_outputs or logit_bias", ()),
    "audio": ("this server generates text only", ()),
    "background": ("responses are made at once; send stream", (False,)),
    "best_of": ("ask for n completions and choose one yourself", (1,)),
    "chat_template": ("the model's own template is used; chat_template_kwargs are passed to it", None),
    "continue_final_message": ("use it with /v1/chat/completions", (False,)),
    "context_management": (_NOTHING, ()),
    "conversation": ("nothing is stored: send all items as input", ()),
    "dimensions": ("embeddings have the model's hidden size", ()),
    "documents": (_NOTHING, ()),
    "early_stopping": ("beam search is not supported", (False,)),
    "echo": ("use it with /v1/completions", (False,)),
    "function_call": ("use tool_choice", ("none",)),
    "functions": ("use tools", ([],)),
    "guided_choice": ("use structured_outputs.choice", None),
    "guided_grammar": ("use grammar", None),
    "guided_json": ("use response_format", None),
    "guided_regex": ("use regex", None),
    "length_penalty": ("beam search is not supported", (1, 1.0)),
    "max_tool_calls": (_NOTHING, ()),
    "modalities": ("this server generates text only", (["text"],)),
    "moderation": (_NOTHING, ()),
    "prediction": (_NOTHING, ()),
    "previous_response_id": ("nothing is stored: send all items as input", ()),
    "priority": (_NOTHING, (0,)),
    "prompt_cache_options": (_NOTHING, ()),
    "prompt_cache_retention": (_NOTHING, ("in_memory",)),
    "prompt_logprobs": ("send echo and logprobs", ()),
    "return_tokens_as_token_ids": (_NOTHING, (False,)),
    "service_tier": ("there is only one service tier", ("auto", "default")),
    "skip_special_tokens": ("special tokens are left out of texts; /detokenize shows them", (True,)),
    "spaces_between_special_tokens": (_NOTHING, (True,)),
    "store": ("nothing is stored", (False,)),
    "suffix": ("fill-in-the-middle is not supported", ("",)),
    "top_a": (_NOTHING, (0,)),
    "truncation": ("nothing is left out of an input; truncate_prompt_tokens of a chat keeps its end", ("disabled",)),
    "use_beam_search": ("ask for n completions and choose one yourself", (False,)),
    "verbosity": (_NOTHING, ("medium",)),
    "web_search_options": (_NOTHING, ()),
}


def without_neutral(body: Any) -> Any:
    """The body without parameters that ask for nothing."""
    if not isinstance(body, dict):
        return body
    return {key: value for key, value in body.items() if not _asks_nothing(key, value)}


def _asks_nothing(key: str, value: Any) -> bool:
    _, neutral = _KNOWN.get(key, ("", None))
    # By type as well, because False == 0 and True == 1.
    same = any(type(value) is type(each) and value == each for each in neutral or ())
    return neutral is not None and (value is None or same)


def why_refused(param: str, name: str) -> tuple[str, str]:
    """Message and code for a parameter that is known but not served, or not known at all."""
    if name not in _KNOWN:
        return f"Unknown parameter: '{param}'.", "unknown_parameter"
    return f"Unsupported parameter: '{param}': {_KNOWN[name][0]}.", "unsupported_parameter"
