"""How much one request may ask for, and how long it may take."""

from dataclasses import dataclass, fields

from fullstride.errors import ConfigError
from fullstride.llm.server.schemas.base import MOST
from fullstride.llm.text.grammar import MOST_BYTES

# What bodies, the engine and grammars have room for: more would be refused request by request.
ROOM = {"prompts": MOST, "messages": MOST, "logprobs": 20, "logit_bias": 300, "schema_bytes": MOST_BYTES}


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of a server; what is above is refused before it costs anything.

    Attributes:
        body_bytes: of a request, counted before it is parsed.
        prompts: of one completions request.
        n: completions of one prompt.
        completions: of one request, prompts x n.
        messages: of one chat.
        tools: of one chat.
        stop: stop texts, or stop token ids.
        stop_chars: of one stop text.
        logprobs: most probable tokens reported at each place.
        logit_bias: tokens with a bias.
        schema_bytes: of a JSON schema, regular expression, grammar, or template arguments, as text.
        queue: completions that may wait beyond what the engine runs at once; more get a 429.
        queue_seconds: that a request may wait before the engine begins with it, after which it gets a 503.
        total_seconds: until the last token, after which it gets a 504.
        connections: at once; more get a 503.
        header_seconds: until a request's header is there, after which it gets a 408.
        body_seconds: until its body is there.
        drain_seconds: that a stopping server gives to what it has accepted.
        stall_seconds: of one engine step, after which /health is red.

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
        """Refuse what no limit can be.

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
