"""Launch of a server: from a model's name to a graceful shutdown after the last accepted request."""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import uvicorn
from fastapi import FastAPI

from fullstride.errors import ConfigError, one_of
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.adapters import read_adapters, with_room
from fullstride.llm.engine.build import Model, select_kernels
from fullstride.llm.llm import load_for_engine
from fullstride.llm.progress import starting
from fullstride.llm.server.app import create_app
from fullstride.llm.server.connections import HEADER_BYTES, BoundedProtocol, make_room
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.middleware import check_keys
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.server.tools.answers import AnswerFormat
from fullstride.llm.server.tools.formats import FORMATS
from fullstride.llm.weights.settings import in_words

logger = logging.getLogger("fullstride.llm.server")
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
# After the time to drain, for the last bytes to be sent.
LAST_BYTES_SECONDS = 5
# How soon a second signal is seen.
TICK_SECONDS = 0.1
# An idle connection is closed later than proxies close theirs (60 s as a rule): a request that is sent at the moment
# when the server closes is lost.
KEEP_ALIVE_SECONDS = 75


def names_of(host: str, api_keys: Sequence[str]) -> tuple[str, ...]:
    """Return the host names that requests may use for a server with this address.

    A page in this machine's browser can call a local server by a name of its own that leads here.
    """
    return ("*",) if api_keys or not is_loopback(host) else tuple(dict.fromkeys((*LOCAL_NAMES, host)))


def name_of(source: str | Path) -> str:
    """Return the default name of a served model: the last part of its path."""
    return os.path.basename(os.path.abspath(Path(source).expanduser()))  # a link keeps its own name


def check_devices(model: ModelConfig, config: EngineConfig, count: int) -> None:
    """Check that there are devices for `count` engines and that they can run the model; nothing is compiled.

    Raises:
        ConfigError: if there are too few devices, or see `fullstride.llm.engine.build.chosen`.

    """
    each, devices = config.tensor_parallel_size, jax.devices()
    if count * each > len(devices):
        wanted = f"data_parallel_size={count} with tensor_parallel_size={each}"
        raise ConfigError(f"{wanted}: expected {count * each} devices, there are {len(devices)}; use smaller sizes")
    select_kernels(model, config, devices[:each])


def replicated(
    loaded: Model, config: EngineConfig, count: int, name: str, adapters: Mapping[str, str | Path] | None = None
) -> list[Engine]:
    """Create engines of the same model, one after the other, each on its own devices; they share compiled grammars.

    Args:
        loaded: the model.
        config: settings of each engine.
        count: number of engines.
        name: name of the model in the log.
        adapters: see `Engine`.

    Raises:
        ConfigError: for settings that the model cannot meet; `check_devices` has looked at the devices.

    """
    each, devices = config.tensor_parallel_size, jax.devices()
    engines: list[Engine] = []
    for number in range(count):
        one = name if count == 1 else f"{name}, engine {number + 1} of {count}"
        with starting(one, logger.info) as start:
            share = devices[number * each : (number + 1) * each]
            engines.append(Engine(loaded, config, start.programs, share, loading=start.weights, adapters=adapters))
        if number and loaded.tokenizer.eos:
            engines[number].share_grammars(engines[0])
    return engines


def serve(
    source: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    names: Sequence[str] = (),
    api_keys: Sequence[str] = (),
    engine: EngineConfig | None = None,
    limits: ServerLimits | None = None,
    data_parallel_size: int = 1,
    generation_config: str = "auto",
    tool_parser: str = "auto",
    adapters: Mapping[str, str | Path] | None = None,
) -> None:
    """Load a model, compile its engine, and serve it until the process is asked to stop; see `run`.

    Names, keys, address, model and devices are checked before anything is compiled.

    Args:
        source: see `fullstride.llm.weights.load`.
        host: address to listen on; by default other machines cannot reach it.
        port: port to listen on.
        names: names that requests may give as `model`; by default the source's own name.
        api_keys: see `create_app`.
        engine: settings of the engine.
        limits: limits of requests.
        data_parallel_size: number of engines, each on its own devices.
        generation_config: whether requests that leave them out get the temperature, top_k, top_p, min_p and
            repetition_penalty that the model's files suggest (`auto`), or OpenAI's defaults (`none`).
        tool_parser: format in which the model writes tool calls, one of `FORMATS`, or `auto`: as its template shows.
        adapters: folders of LoRA adapters by the names that requests give as `model`.

    Raises:
        ConfigError: for a model, a name, an address, a key or settings that cannot be.

    """
    one_of("--generation-config", generation_config, ("auto", "none"))
    one_of("--tool-parser", tool_parser, ("auto", *FORMATS))
    check_keys(api_keys)
    if not all(names):
        raise ConfigError("a name is empty: expected the model's name in requests; omit it for the default name")
    check_free(host, port)
    names, adapters = tuple(names or (name_of(source),)), dict(adapters or {})
    if taken := adapters.keys() & set(names):
        raise ConfigError(f"--lora {min(taken)}: the model itself has this name; give the adapter another one")
    settings = engine or EngineConfig()
    loaded = load_for_engine(source, settings)
    answers = AnswerFormat.of(tool_parser, loaded.tokenizer.template)
    loaded = replace(loaded, tokenizer=loaded.tokenizer.showing(answers.marks))
    if adapters:
        settings = with_room(settings, read_adapters(adapters, loaded.config))
    check_devices(loaded.config, settings, data_parallel_size)
    log_to_stderr()  # not before: the engines say again why they pass over sets of kernels
    engines = replicated(loaded, settings, data_parallel_size, str(source), adapters)
    # Each has a pool as large as its devices have room for.
    longest = min(engine.sizes.max_length for engine in engines)
    sampling = loaded.sampling if generation_config == "auto" else {}
    if sampling:
        told = "sampling defaults from the model's files: %s (--generation-config none ignores them)"
        logger.info(told, in_words(sampling))
    served = ServedModel(names, loaded.tokenizer, longest, sampling, tool_parser, tuple(adapters))
    logger.info("tool calls are read as %s (--tool-parser)", answers.calls.name)
    grammars = engines[0].grammars if loaded.tokenizer.eos else None
    app = create_app(
        engines,
        served,
        concurrent=engines[0].sizes.rows,
        limits=limits,
        api_keys=api_keys,
        grammars=grammars,
        hosts=names_of(host, api_keys),
    )
    run(app, host=host, port=port, api_keys=api_keys)


class DrainingServer(uvicorn.Server):
    """Tells the bridge when it is about to stop, so that every accepted request is answered or told why not."""

    def __init__(self, app: FastAPI, **settings: Any):
        """Serve an app of `create_app`; the settings are uvicorn's."""
        self._bridge, limits = app.state.server.bridge, app.state.server.limits
        own = {"header_seconds": limits.header_seconds, "body_seconds": limits.body_seconds, "most": limits.connections}
        protocol = type("BoundedProtocol", (BoundedProtocol,), own)
        settings = {"http": protocol, "h11_max_incomplete_event_size": HEADER_BYTES, "ws": "none", **settings}
        settings.setdefault("timeout_keep_alive", KEEP_ALIVE_SECONDS)
        settings.setdefault("timeout_graceful_shutdown", LAST_BYTES_SECONDS)
        # Prompts are in bodies alone, and bodies are never logged; RequestLog has a line for every request.
        super().__init__(uvicorn.Config(app, access_log=False, server_header=False, lifespan="on", **settings))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve with all existing objects excluded from Python's garbage collection.

        Those are hundreds of thousands of JAX's and others', and a body of many lists would have it look through all of
        them, for 0.15 s in which no thread moves.
        """
        gc.freeze()
        try:
            await super().serve(sockets)
        finally:
            gc.unfreeze()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the accepted requests, then stop listening and end the application.

        It listens meanwhile, so that who asks is told to go elsewhere: uvicorn would refuse connections at once.
        """
        draining = asyncio.create_task(self._bridge.drain())
        while not draining.done() and not self.force_exit:
            await asyncio.wait((draining,), timeout=TICK_SECONDS)
        draining.cancel()
        await super().shutdown(sockets)


def log_to_stderr() -> None:
    """Log messages of a server and its engines to stderr, unless logging is already configured."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if (jax := logging.getLogger("jax")).level == logging.NOTSET:
        jax.setLevel(logging.WARNING)  # it tells of each kind of device that is not there


def run(app: FastAPI, *, host: str = "127.0.0.1", port: int = 8000, api_keys: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second SIGINT ends it at once.

    After a SIGTERM this returns, so that a process that has answered everything exits with 0.
    """
    log_to_stderr()
    if not is_loopback(host) and not api_keys:
        logger.warning("%s is reachable from other machines, and there is no API key: anyone can use this server", host)
    make_room(app.state.server.limits.connections)
    server = DrainingServer(app, host=host, port=port, log_config=None)
    gc.collect()  # what is garbage now would be kept
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal again once it has stopped, for whoever handled it before.
        signal.signal(signal.SIGTERM, lambda *_: None)
    server.run()


@contextlib.contextmanager
def background(app: FastAPI) -> Iterator[str]:
    """Serve an app on a free port of this machine, in a separate thread; yield the URL.

    Raises:
        RuntimeError: if it does not start, or does not stop.

    """
    # What was accepted has its time to end, twice: in the server, and in the engine's thread.
    longest = 2 * (app.state.server.limits.drain_seconds + LAST_BYTES_SECONDS)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        server = DrainingServer(app, log_config=None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the server ended before it was ready; see its log")
                thread.join(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(min(longest, threading.TIMEOUT_MAX))
        if thread.is_alive():
            raise RuntimeError(f"the server still runs {longest:g} s after it was asked to stop")


def check_free(host: str, port: int) -> None:
    """Check that the server can listen on an address, before a model is loaded.

    Raises:
        ConfigError: if the host is none of this machine's, or the port is taken.

    """
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from None


def is_loopback(host: str) -> bool:
    """Return whether `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
