"""Limits of a request: its size, its work and its time."""

from dataclasses import dataclass, fields

from fullstride.errors import ConfigError
from fullstride.llm.server.schemas.base import MOST
from fullstride.llm.text.grammar import MOST_BYTES

# What bodies, the engine and grammars have room for: more would be refused request by request.
ROOM = {"prompts": MOST, "messages": MOST, "logprobs": 20, "logit_bias": 300, "schema_bytes": MOST_BYTES}


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server; requests above them are rejected before they cost anything.

    Attributes:
        body_bytes: bytes of a request's body, counted before it is parsed.
        prompts: prompts of one completions request.
        n: completions per prompt.
        completions: completions of one request, prompts x n.
        messages: messages of one chat.
        tools: tools of one chat.
        stop: number of stop texts, or of stop token ids.
        stop_chars: characters of one stop text.
        logprobs: most probable tokens reported at each position.
        logit_bias: number of tokens with a bias.
        schema_bytes: bytes of a JSON schema, regular expression, grammar, or template arguments, as text.
        queue: completions that may wait in addition to the running ones; more get a 429.
        queue_seconds: seconds that a request may wait before the engine starts it, after which it gets a 503.
        total_seconds: seconds until the last token, after which a request gets a 504.
        connections: open connections; more get a 503.
        header_seconds: seconds to receive a request's header, after which it gets a 408.
        body_seconds: seconds to receive a request's body, after which it gets a 408.
        drain_seconds: seconds that a stopping server gives to accepted requests.
        stall_seconds: seconds of one engine step after which /health reports a failure.

    """

    body_bytes: int = 2 << 20
    prompts: int = 128
    n: int = 16
    completions: int = 256
    messages: int = 2048
    tools: int = 128
    stop: int = 16
    stop_chars: int = 256
    logprobs: int = 20
    logit_bias: int = 300
    schema_bytes: int = MOST_BYTES
    queue: int = 512
    queue_seconds: float = 120.0
    total_seconds: float = 600.0
    connections: int = 1000
    header_seconds: float = 20.0
    body_seconds: float = 60.0
    drain_seconds: float = 30.0
    stall_seconds: float = 120.0

    def __post_init__(self):
        """Validate the limits.

        Raises:
            ConfigError: naming the limit.

        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                expected = "a finite number, 0 or more (use a large one for no limit)"
                raise ConfigError(f"{field.name}={value}: expected {expected}")
        for name, most in ROOM.items():
            if (value := getattr(self, name)) > most:
                raise ConfigError(f"{name}={value}: expected at most {most}, this server's capacity")
