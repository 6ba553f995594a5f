"""Log likelihoods of continuations."""

from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.outputs import RequestOutput, ScoreOutput
from fullstride.llm.prompts import normalize, token_ids
from fullstride.llm.sampling_params import SamplingParams

SCORING = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


def joined(tokenizer: Any, prompt: Any, continuation: Any) -> tuple[list[int], int]:
    """Return the tokens of a prompt and its continuation, and where the continuation begins.

    Raises:
        ConfigError: if one is a text and the other token ids, or one has no tokens.

    """
    prompt, continuation = normalize(prompt), normalize(continuation)
    if isinstance(prompt, str) != isinstance(continuation, str):
        raise ConfigError("of a prompt and its continuation one is a text, one token ids: expected two of one kind")
    if isinstance(prompt, str):
        # The two are encoded together. A space at the end of the prompt belongs to the word that follows.
        whole, start = tokenizer.encode(prompt + continuation), len(tokenizer.encode(prompt.rstrip()))
    else:
        first = token_ids(prompt)
        whole, start = [*first, *token_ids(continuation)], len(first)
    if not 0 < start < len(whole):
        found = f"{start} tokens of prompt and {len(whole) - start} of continuation"
        raise ConfigError(f"{found}: expected one or more of each")
    return whole, start


def scored(output: RequestOutput, start: int) -> ScoreOutput:
    """Return the score of the tokens of a prompt from `start` on."""
    places = [place[0] for place in (output.prompt_logprobs or ())[start:] if place]
    values = [place.logprob for place in places]
    return ScoreOutput(sum(values), values, output.prompt_token_ids[start:], all(place.rank == 1 for place in places))
