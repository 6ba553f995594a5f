"""From a model's name to a server that runs."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fullstride.llm.engine import EngineConfig
from fullstride.llm.offline import LLM
from fullstride.llm.server.app import create_app
from fullstride.llm.server.limits import Limits
from fullstride.llm.server.middleware import check_keys
from fullstride.llm.server.run import check_free, is_loopback, run
from fullstride.llm.server.served import Served

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def names_of(host: str, api_keys: Sequence[str]) -> tuple[str, ...]:
    """Names by which requests may call a server that listens there.

    A page in this machine's browser can call a local server by a name of its own that leads here.
    """
    if api_keys or not is_loopback(host):
        return ("*",)
    return tuple(dict.fromkeys((*LOCAL_NAMES, host)))


def serve(
    source: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    names: Sequence[str] = (),
    api_keys: Sequence[str] = (),
    engine: EngineConfig | None = None,
    limits: Limits | None = None,
) -> None:
    """Load a model, compile its engine, and serve it until the process is told to stop; see `run`.

    Args:
        source: see `fullstride.llm.weights.load`.
        host: address to listen on; by default no other machine reaches it.
        port: of that address.
        names: that requests may give as `model`; the source's own name if there are none.
        api_keys: see `create_app`.
        engine: settings of the engine.
        limits: of requests.

    Raises:
        ConfigError: for a model, an address, a key or settings that cannot be.

    """
    check_keys(api_keys)
    check_free(host, port)
    llm = LLM(source, **asdict(engine or EngineConfig()))
    sizes = llm.engine.sizes
    served = Served(names or (Path(source).expanduser().name,), llm.tokenizer, sizes.max_length)
    grammars = llm.engine.grammars if llm.tokenizer.eos else None
    app = create_app(
        llm.engine,
        served,
        concurrent=sizes.rows,
        limits=limits,
        api_keys=api_keys,
        grammars=grammars,
        hosts=names_of(host, api_keys),
    )
    run(app, host=host, port=port, api_keys=api_keys)
