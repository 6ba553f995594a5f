"""`fullstride llm serve`; it imports the server when it runs."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from fullstride.errors import ConfigError, one_of
from fullstride.llm.vllm_names import DIFFERENT, ENGINE
from fullstride.renamed import own_names

T = TypeVar("T")
KEYS_VARIABLE = "FULLSTRIDE_API_KEY"
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--name",
        "--served-model-name",
        help="Name of the model in requests; its own unless given. May be repeated.",
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar=KEYS_VARIABLE,
        show_envvar=True,
        help="Key that every route but /health and /ready requires. May be repeated; in the variable, split by spaces.",
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        "--lora-modules",
        metavar="NAME=PATH",
        help="LoRA adapter in PEFT's form, and its name in requests. May be repeated.",
    ),
]
EngineSettings = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="KEY=VALUE", help="Setting of the engine, e.g. max_sequences=64, kv_blocks=4096."),
]
Speculation = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help='Drafts to verify several tokens in one step, e.g. {"method": "ngram", "num_speculative_tokens": 7}.',
    ),
]
LimitSettings = Annotated[
    list[str] | None,
    typer.Option("--limit", metavar="KEY=VALUE", help="Limit of requests, e.g. queue=100, total_seconds=60, n=4."),
]


def serve(
    model: Annotated[
        str,
        typer.Option(metavar="NAME|PATH", help="Folder with safetensors, GGUF file, or known name, e.g. smollm2."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines connect.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one and logs it.")
    ] = 8000,
    name: Names = None,
    lora: Adapters = None,
    api_key: Keys = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Number of devices that share the model.")
    ] = None,
    data_parallel_size: Annotated[
        int,
        typer.Option(
            min=1, help="Number of engines, each on its own devices; requests go to the one that caches their prefix."
        ),
    ] = 1,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="auto|none|stored|fp8|int8|int4",
            help="Packing of the weights: as the files have them (stored), or made when they are loaded.",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(metavar="auto|fp8", help="Dtype of the KV cache."),
    ] = None,
    generation_config: Annotated[
        str,
        typer.Option(
            metavar="auto|none", help="Default sampling parameters: the model's own (auto) or OpenAI's (none)."
        ),
    ] = "auto",
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", "--max-model-len", help="Tokens of a prompt and its output together, at most."),
    ] = None,
    max_sequences: Annotated[
        int | None,
        typer.Option("--max-sequences", "--max-num-seqs", help="Number of sequences that run at once; others wait."),
    ] = None,
    max_tokens_per_step: Annotated[
        int | None,
        typer.Option(
            "--max-tokens-per-step", "--max-num-batched-tokens", help="Number of tokens per step (chunked prefill)."
        ),
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Share KV cache blocks between prompts with a common prefix.",
        ),
    ] = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            "--tool-parser",
            "--tool-call-parser",
            metavar="auto|NAME",
            help="Format of the model's tool calls: as its template shows (auto), or hermes, llama3_json, mistral, "
            "qwen3_coder, pythonic, deepseek_v3, granite, gpt_oss.",
        ),
    ] = "auto",
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(hidden=True, help="Refused: see --engine kv_share=0.8.")
    ] = None,
    speculative_config: Speculation = None,
    engine: EngineSettings = None,
    limit: LimitSettings = None,
) -> None:
    """Serve a model to OpenAI's clients.

    SIGTERM stops it once the accepted requests are finished.
    """
    from fullstride.llm.engine.config import EngineConfig
    from fullstride.llm.server.launch import serve as run
    from fullstride.llm.server.limits import ServerLimits

    own = {
        "tensor_parallel_size": tensor_parallel_size,
        "quantize": quantize,
        "kv_cache_dtype": kv_cache_dtype,
        "max_length": max_length,
        "max_sequences": max_sequences,
        "max_tokens_per_step": max_tokens_per_step,
        "prefix_cache": prefix_cache,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    named = [f"{key}={value}" for key, value in own.items() if value is not None]
    config = parsed("--engine", EngineConfig, [*(engine or ()), *named])
    if speculative_config is not None:
        config = replace(config, speculative_config=as_json("--speculative-config", speculative_config))
    limits = parsed("--limit", ServerLimits, limit or [])
    run(
        model,
        host=host,
        port=port,
        names=name or (),
        api_keys=_keys(api_key),
        engine=config,
        limits=limits,
        data_parallel_size=data_parallel_size,
        generation_config=generation_config,
        tool_parser=tool_parser,
        adapters=_adapters(lora or ()),
    )


def parsed(option: str, kind: type[T], given: Sequence[str]) -> T:
    """Create a dataclass of settings; each `KEY=VALUE` replaces a default.

    Raises:
        ConfigError: for a key that the dataclass does not have, or a value that is not of the key's type.

    """
    from pydantic import TypeAdapter, ValidationError

    hints, values = get_type_hints(kind), dict[str, Any]()
    for item in given:
        name, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"{option} {item}: expected KEY=VALUE, with one of the keys {', '.join(hints)}")
        (key,) = own_names({name: text}, ENGINE, different=DIFFERENT) if option == "--engine" else (name,)
        one_of(option, key, hints)
        if key in values:
            raise ConfigError(f"{option} {item}: {key} is given twice; give it once")
        try:
            values[key] = TypeAdapter(hints[key]).validate_strings(text)
        except ValidationError as error:
            raise ConfigError(f"{option} {item}: {error.errors()[0]['msg'].lower()}") from None
    return kind(**values)


def as_json(option: str, text: str) -> Any:
    """Return what an option gives as JSON.

    Raises:
        ConfigError: if it is none.

    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: expected JSON: {str(error).lower()}") from None


def _adapters(given: Sequence[str]) -> dict[str, str]:
    """Return the folders of adapters by their names.

    Raises:
        ConfigError: for anything but NAME=PATH, or a name that is given twice.

    """
    found: dict[str, str] = {}
    for item in given:
        name, _, folder = item.partition("=")
        if not name or not folder or name in found:
            reason = "the name is given twice" if name in found else "expected NAME=PATH"
            raise ConfigError(f"--lora {item}: {reason}")
        found[name] = folder
    return found


def _keys(given: list[str] | None) -> Sequence[str]:
    """Return the API keys; to Click, an empty or blank variable is unset, which would let every client in.

    Raises:
        ConfigError: for such a variable, unless keys are also given as options.

    """
    if not given and KEYS_VARIABLE in os.environ:
        raise ConfigError(f"{KEYS_VARIABLE} is empty: expected one key or more; unset it to let every client in")
    return given or ()
