"""Log probabilities in the formats of the two generating routes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fullstride.llm.outputs import Logprob
from fullstride.llm.text.utf8_stream import TextPrefix, Utf8Decoder

# OpenAI's stand-in for minus infinity, which JSON does not have.
LOWEST = -9999.0

TokenBytes = Callable[[int], bytes]
AtToken = Sequence[Logprob]


def _finite(logprob: float) -> float:
    return max(LOWEST, logprob)


def _entry(of: Logprob, token_bytes: TokenBytes) -> dict[str, Any]:
    text = token_bytes(of.token)
    return {"token": text.decode(errors="replace"), "logprob": _finite(of.logprob), "bytes": list(text)}


def chat_logprobs(places: Sequence[AtToken] | None, token_bytes: TokenBytes) -> dict[str, Any] | None:
    """Logprobs of a chat's tokens, each with the most probable alternatives at its position."""
    if places is None:
        return None
    content = []
    for chosen, *top in places:
        entry = _entry(chosen, token_bytes)
        content.append(entry | {"top_logprobs": [_entry(other, token_bytes) for other in top]})
    return {"content": content, "refusal": None}


def prompt_logprobs(places: Sequence[AtToken | None], token_bytes: TokenBytes) -> list[dict[str, Any] | None]:
    """Logprobs of a prompt's tokens, by token id, as vLLM writes them; the first token has none."""

    def entry(of: Logprob) -> dict[str, Any]:
        text = token_text(token_bytes(of.token))
        return {"logprob": _finite(of.logprob), "rank": of.rank, "decoded_token": text}

    return [None if place is None else {str(each.token): entry(each) for each in place} for place in places]


def token_text(token: bytes) -> str:
    r"""A token as a text; a part of a character as OpenAI writes it, `bytes:\xe2\x82`, so that parts differ."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class CompletionLogprobsWriter:
    """Writer of the logprobs of a completion's tokens; offsets count characters from the start of the text."""

    def __init__(self, token_bytes: TokenBytes, special: Mapping[int, str], beginning: TextPrefix):
        """Start at the beginning of a text.

        Args:
            token_bytes: what a token adds to it.
            special: tokens that are in it only where the prompt has them, as it spells them.
            beginning: of the text.

        """
        self._token_bytes = token_bytes
        self._special = special
        self._text = Utf8Decoder(beginning)
        self._offset = 0

    def write(self, places: Sequence[AtToken | None], first: int, echo: str = "") -> dict[str, list[Any]]:
        """The next places; None, for the token `first` of a prompt, has no probabilities; `echo` is the prompt."""
        written: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for place in places:
            chosen = first if place is None else place[0].token
            written["tokens"].append(token_text(self._token_bytes(chosen)))
            written["token_logprobs"].append(None if place is None else _finite(place[0].logprob))
            # The most probable ones, and the chosen one if it is none of them: up to one more than asked for.
            best = () if place is None else (*place[1:], place[0])
            top = {token_text(self._token_bytes(each.token)): _finite(each.logprob) for each in best}
            written["top_logprobs"].append(None if place is None else top)
            written["text_offset"].append(self._offset)
            self._offset += self._characters(chosen, echo)
        return written

    def _characters(self, token: int, echo: str) -> int:
        text = self._token_bytes(token)
        # Half a character before it is U+FFFD by then, which is counted with the mark that cuts it off.
        at = self._offset + bool(self._text.half)
        if token in self._special:
            # As it was given, or decoded from token ids.
            ways = (self._special[token].encode(), text)
            text = next((way for way in ways if echo.startswith(way.decode(errors="replace"), at)), b"")
        return len(self._text.push(text))
