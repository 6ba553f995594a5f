"""Runs a server until it is told to stop, and then until what it accepted is answered."""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from fullstride.errors import ConfigError
from fullstride.llm.server.connections import HEADER_BYTES, bounded, make_room
from fullstride.llm.server.context import Server

logger = logging.getLogger("fullstride.llm.server")
# After the time to drain, for the last bytes to be sent.
LAST_BYTES_SECONDS = 5
# How soon a second signal is seen.
TICK_SECONDS = 0.1
# An idle connection is closed later than proxies close theirs (60 s as a rule): a request that is sent at the moment
# when the server closes is lost.
KEEP_ALIVE_SECONDS = 75
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class DrainingServer(uvicorn.Server):
    """Tells the bridge when it is about to stop, so that every accepted request is answered or told why not."""

    def __init__(self, app: FastAPI, **settings: Any):
        """Serve an app of `create_app`; the settings are uvicorn's."""
        self._bridge = _server(app).bridge
        limits = _server(app).limits
        protocol = bounded(limits.header_seconds, limits.body_seconds, limits.connections)
        settings = {"http": protocol, "h11_max_incomplete_event_size": HEADER_BYTES, "ws": "none", **settings}
        settings.setdefault("timeout_keep_alive", KEEP_ALIVE_SECONDS)
        settings.setdefault("timeout_graceful_shutdown", LAST_BYTES_SECONDS)
        # Prompts are in bodies alone, and bodies are never logged; RequestLog has a line for every request.
        super().__init__(uvicorn.Config(app, access_log=False, server_header=False, lifespan="on", **settings))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, while Python's garbage collector passes over what there was before.

        Those are hundreds of thousands of JAX's and others', and a body of many lists would have it look through all of
        them, for 0.15 s in which no thread moves.
        """
        gc.freeze()
        try:
            await super().serve(sockets)
        finally:
            gc.unfreeze()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what was accepted, then stop listening and end the application.

        It listens meanwhile, so that who asks is told to go elsewhere: uvicorn would refuse connections at once.
        """
        draining = asyncio.create_task(self._bridge.drain())
        while not draining.done() and not self.force_exit:
            await asyncio.wait((draining,), timeout=TICK_SECONDS)
        draining.cancel()
        await super().shutdown(sockets)


def _server(app: FastAPI) -> Server:
    return app.state.server


def log_to_stderr() -> None:
    """Log what a server and its engines say, unless logging is set up already."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    if (jax := logging.getLogger("jax")).level == logging.NOTSET:
        jax.setLevel(logging.WARNING)  # it tells of each kind of device that is not there


def run(app: FastAPI, *, host: str = "127.0.0.1", port: int = 8000, api_keys: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second SIGINT ends it at once.

    After a SIGTERM this returns, so that a process that has answered everything exits with 0.
    """
    log_to_stderr()
    if not is_loopback(host) and not api_keys:
        logger.warning("%s is reachable from other machines, and there is no API key: everybody may use it", host)
    make_room(_server(app).limits.connections)
    server = DrainingServer(app, host=host, port=port, log_config=None)
    gc.collect()  # what is garbage now would be kept
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal again once it has stopped, for whoever handled it before.
        signal.signal(signal.SIGTERM, lambda *_: None)
    server.run()


@contextlib.contextmanager
def background(app: FastAPI) -> Iterator[str]:
    """Serve an app on a free port of this machine, from a thread of its own; the URL.

    Raises:
        RuntimeError: if it does not start, or does not stop.

    """
    # What was accepted has its time to end, twice: in the server, and in the engine's thread.
    longest = 2 * (_server(app).limits.drain_seconds + LAST_BYTES_SECONDS)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        server = DrainingServer(app, log_config=None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the server ended before it served; its log says why")
                thread.join(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(min(longest, threading.TIMEOUT_MAX))
        if thread.is_alive():
            raise RuntimeError(f"the server still runs {longest:g} s after it was told to stop")


def check_free(host: str, port: int) -> None:
    """See that the server will be able to listen there, before a model is loaded for it.

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
    """Whether no other machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
