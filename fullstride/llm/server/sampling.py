"""Sampling parameters of a request's body, checked against the server's limits."""

from typing import Any

from fullstride.llm.sampling_params import ParamError, SamplingParams, Structured
from fullstride.llm.server.errors import BadRequestError, refusing
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.schemas.base import SamplingRequest
from fullstride.llm.server.served_model import ServedModel

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "ignore_eos", "min_tokens",
)  # fmt: skip


def at_most(param: str, value: int | None, most: int, what: str = "") -> None:
    """Reject a value above a limit.

    Raises:
        BadRequestError: naming the parameter, its value and the limit.

    """
    if value is not None and value > most:
        message = f"Invalid '{param}': {value}{what}; expected at most {most}, this server's limit."
        raise BadRequestError(message, param=param, code="above_limit")


def check_limits(request: SamplingRequest, limits: ServerLimits) -> None:
    """Reject a request above the server's limits.

    Raises:
        BadRequestError: see `at_most`.

    """
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    at_most("n", request.n, limits.n)
    at_most("stop", len(stop), limits.stop, " entries")
    at_most("stop", max(map(len, stop), default=0), limits.stop_chars, " characters")
    at_most("stop_token_ids", len(request.stop_token_ids or ()), limits.stop, " entries")
    at_most("logit_bias", len(request.logit_bias or ()), limits.logit_bias, " entries")
    at_most("bad_words", len(request.bad_words or ()), limits.logit_bias, " entries")
    at_most("bad_words", max(map(len, request.bad_words or ()), default=0), limits.stop_chars, " characters")


def sampling_params(
    request: SamplingRequest,
    served: ServedModel,
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
    bias = request.logit_bias or {}
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias):
        raise BadRequestError(
            "Invalid 'logit_bias': expected token ids, written in digits, as keys.", param="logit_bias"
        )
    try:
        return SamplingParams(
            **given,
            logit_bias=dict(zip(served.known([int(key) for key in bias], "logit_bias"), bias.values(), strict=True)),
            stop=request.stop or (),
            bad_words=request.bad_words,
            stop_token_ids=served.known(request.stop_token_ids or [], "stop_token_ids"),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=shape,
            include_stop_str_in_output=bool(request.include_stop_str_in_output),
        )
    except ParamError as error:
        raise refusing(error, error.param) from error
