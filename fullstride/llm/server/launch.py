"""From a model's name to a server that runs."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from fullstride.errors import ConfigError, one_of
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.build import Model, chosen
from fullstride.llm.llm import opened
from fullstride.llm.progress import starting
from fullstride.llm.server.app import create_app
from fullstride.llm.server.limits import Limits
from fullstride.llm.server.middleware import check_keys
from fullstride.llm.server.run import check_free, is_loopback, log_to_stderr, run
from fullstride.llm.server.served_model import Served
from fullstride.llm.weights.suggested import in_words

logger = logging.getLogger("fullstride.llm.server")
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def names_of(host: str, api_keys: Sequence[str]) -> tuple[str, ...]:
    """Names by which requests may call a server that listens there.

    A page in this machine's browser can call a local server by a name of its own that leads here.
    """
    if api_keys or not is_loopback(host):
        return ("*",)
    return tuple(dict.fromkeys((*LOCAL_NAMES, host)))


def name_of(source: str | Path) -> str:
    """What requests call a model that was given no name: the last part of its path."""
    return os.path.basename(os.path.abspath(Path(source).expanduser()))  # a link keeps its own name


def check_devices(model: ModelConfig, config: EngineConfig, count: int) -> None:
    """See that there are devices for so many engines of a model, and that they can run it; nothing is compiled.

    Raises:
        ConfigError: if there are too few devices, or see `fullstride.llm.engine.build.chosen`.

    """
    each, devices = config.tensor_parallel_size, jax.devices()
    if count * each > len(devices):
        wanted = f"data_parallel_size={count} with tensor_parallel_size={each}"
        raise ConfigError(f"{wanted}: expected {count * each} devices, there are {len(devices)}; give smaller sizes")
    chosen(model, config, devices[:each])


def replicated(loaded: Model, config: EngineConfig, count: int, name: str) -> list[Engine]:
    """Make engines of the same model, one after the other on devices of their own; they share compiled grammars.

    Args:
        loaded: the model.
        config: settings of each engine.
        count: how many.
        name: of the model, in the log.

    Raises:
        ConfigError: for settings that the model cannot meet; `check_devices` has looked at the devices.

    """
    each, devices = config.tensor_parallel_size, jax.devices()
    engines: list[Engine] = []
    for number in range(count):
        one = name if count == 1 else f"{name}, engine {number + 1} of {count}"
        with starting(one, logger.info) as start:
            share = devices[number * each : (number + 1) * each]
            engines.append(Engine(loaded, config, start.programs, share, loading=start.weights))
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
    limits: Limits | None = None,
    data_parallel_size: int = 1,
    generation_config: str = "auto",
) -> None:
    """Load a model, compile its engine, and serve it until the process is told to stop; see `run`.

    Names, keys, address, model and devices are looked at before anything is compiled.

    Args:
        source: see `fullstride.llm.weights.load`.
        host: address to listen on; by default no other machine reaches it.
        port: of that address.
        names: that requests may give as `model`; the source's own name if there are none.
        api_keys: see `create_app`.
        engine: settings of the engine.
        limits: of requests.
        data_parallel_size: engines, each on devices of its own.
        generation_config: whether requests that leave them out get the temperature, top_k, top_p, min_p and
            repetition_penalty that the model's files suggest (`auto`), or OpenAI's defaults (`none`).

    Raises:
        ConfigError: for a model, a name, an address, a key or settings that cannot be.

    """
    one_of("--generation-config", generation_config, ("auto", "none"))
    check_keys(api_keys)
    if not all(names):
        raise ConfigError("a name is empty: expected what requests call the model; without any it has its own")
    check_free(host, port)
    settings = engine or EngineConfig()
    loaded = opened(source, settings)
    check_devices(loaded.config, settings, data_parallel_size)
    log_to_stderr()  # not before: the engines say again why they pass over sets of kernels
    engines = replicated(loaded, settings, data_parallel_size, str(source))
    # Each has a pool as large as its devices have room for.
    longest = min(engine.sizes.max_length for engine in engines)
    sampling = loaded.sampling if generation_config == "auto" else {}
    if sampling:
        told = "%s, for requests that leave it out, as the model suggests; or --generation-config none"
        logger.info(told, in_words(sampling))
    served = Served(names or (name_of(source),), loaded.tokenizer, longest, sampling)
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
