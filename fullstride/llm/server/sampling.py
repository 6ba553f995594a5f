"""From a request's body to the engine's sampling parameters, within the server's limits."""

import json
from collections.abc import Sized
from typing import Any

from fullstride.llm.sampling_params import ParamError, SamplingParams, Structured
from fullstride.llm.server.errors import BadRequestError, refusing
from fullstride.llm.server.limits import Limits
from fullstride.llm.server.schemas.base import SamplingRequest
from fullstride.llm.server.served_model import Served

_SAME_NAME = [
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
]


def at_most(param: str, value: int | None, most: int, what: str = "") -> None:
    """Refuse what is above a limit.

    Raises:
        BadRequestError: naming the parameter, its value and the limit.

    """
    if value is not None and value > most:
        code = "above_limit"
        raise BadRequestError(
            f"Invalid '{param}': {value}{what}; this server takes at most {most}.", param=param, code=code
        )


def _few(param: str, values: Sized | None, most: int) -> None:
    at_most(param, len(values) if values is not None else None, most, " entries")


def few_template_arguments(kwargs: dict[str, Any] | None, limits: Limits) -> dict[str, Any]:
    """Arguments for the chat template.

    Raises:
        BadRequestError: if they are too large, would replace the server's own, or have a name that Jinja keeps.

    """
    kwargs = kwargs or {}
    if own := {"messages", "tools", "add_generation_prompt"} & kwargs.keys():
        message = f"chat_template_kwargs: {min(own)} has a parameter of its own."
        raise BadRequestError(message, param="chat_template_kwargs")
    if "self" in kwargs:
        message = "chat_template_kwargs: a template cannot read 'self', which is Jinja's own; use another name."
        raise BadRequestError(message, param="chat_template_kwargs")
    at_most("chat_template_kwargs", len(json.dumps(kwargs)), limits.schema_bytes, " bytes")
    return kwargs


def check_limits(request: SamplingRequest, limits: Limits) -> None:
    """Refuse what asks for too much.

    Raises:
        BadRequestError: see `at_most`.

    """
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    at_most("n", request.n, limits.n)
    _few("stop", stop, limits.stop)
    at_most("stop", max(map(len, stop), default=0), limits.stop_chars, " characters")
    _few("stop_token_ids", request.stop_token_ids, limits.stop)
    _few("logit_bias", request.logit_bias, limits.logit_bias)


def sampling_params(
    request: SamplingRequest,
    served: Served,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    shape: Structured | None = None,
) -> SamplingParams:
    """The engine's parameters; what the request leaves out is as the model suggests, else OpenAI's default.

    Raises:
        BadRequestError: for a token that the model does not have, or a value that cannot be, such as more `min_tokens`
            than `max_tokens`.

    """
    asked = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    given: dict[str, Any] = served.sampling | asked
    try:
        return SamplingParams(
            **given,
            logit_bias=_bias(request, served),
            stop=request.stop or (),
            stop_token_ids=served.known(request.stop_token_ids or [], "stop_token_ids"),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured=shape,
            include_stop=bool(request.include_stop_str_in_output),
        )
    except ParamError as error:
        raise refusing(error, error.param) from error


def _bias(request: SamplingRequest, served: Served) -> dict[int, float]:
    bias = request.logit_bias or {}
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias):
        raise BadRequestError("Invalid 'logit_bias': its keys are token ids, written in digits.", param="logit_bias")
    return dict(zip(served.known([int(key) for key in bias], "logit_bias"), bias.values(), strict=True))
