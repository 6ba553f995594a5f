"""Parameters of OpenAI's and vLLM's APIs that would change the answer, which this server does not do: refused, each
with what to do instead. A value that asks for nothing is taken.
"""

from typing import Any

# Values by which a client says that it does not want the thing; None always is one.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "continue_final_message": (False,),
    "documents": (),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "priority": (0,),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "top_a": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_INSTEAD = {
    "allowed_token_ids": "use structured_outputs or logit_bias",
    "audio": "this server generates text only",
    "bad_words": "use logit_bias",
    "best_of": "ask for n completions and choose one yourself",
    "chat_template": "the model's own template is used; chat_template_kwargs are passed to it",
    "early_stopping": "there is no beam search",
    "echo": "/v1/completions has it",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use grammar",
    "guided_json": "use response_format",
    "guided_regex": "use regex",
    "length_penalty": "there is no beam search",
    "modalities": "this server generates text only",
    "prompt_logprobs": "send echo and logprobs to /v1/completions",
    "reasoning_effort": "pass what the model's template knows, such as enable_thinking, as chat_template_kwargs",
    "service_tier": "there is one tier",
    "skip_special_tokens": "marks are left out of texts; /detokenize shows them",
    "store": "nothing is stored",
    "suffix": "the models served here do not fill in the middle",
    "truncate_prompt_tokens": "shorten the prompt yourself; /tokenize counts its tokens",
    "use_beam_search": "ask for n completions and choose one yourself",
}


def without_neutral(body: Any) -> Any:
    """The body without parameters that ask for nothing."""
    if not isinstance(body, dict):
        return body
    return {key: value for key, value in body.items() if key not in _NEUTRAL or not _asks_nothing(key, value)}


def _asks_nothing(key: str, value: Any) -> bool:
    # By type as well, because False == 0 and True == 1.
    return value is None or any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL[key])


def why_refused(param: str, name: str) -> tuple[str, str]:
    """Message and code for a parameter that is known but not served, or not known at all."""
    if name not in _NEUTRAL and name not in _INSTEAD:
        return f"Unknown parameter: '{param}'.", "unknown_parameter"
    instead = _INSTEAD.get(name, "this server has nothing of the kind")
    return f"Unsupported parameter: '{param}': {instead}.", "unsupported_parameter"
