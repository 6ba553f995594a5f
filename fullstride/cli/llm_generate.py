"""`fullstride llm generate`: answer a prompt, or the turns of a conversation, and stream the answer."""

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullstride.cli.llm_serve import Speculation, as_json
from fullstride.errors import ConfigError

if TYPE_CHECKING:
    from fullstride.llm.llm import LLM
    from fullstride.llm.outputs import Delta
    from fullstride.llm.text.tokenizer import Tokenizer

# A small model may never end by itself.
MOST_TOKENS = 512


def generate(
    prompt: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT",
            help="The user's message; - reads it from stdin. Several are the turns of one conversation.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(metavar="NAME|PATH", help="Folder with config.json and safetensors, GGUF file, or known name."),
    ] = "smollm2",
    system: Annotated[str, typer.Option(help="System message, before the user's.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt itself, without the chat template.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of the answer; 512, or as many as fit, unless given.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 takes the most probable token.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set of tokens with this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most probable tokens; 0 takes all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed for a reproducible answer; random unless given.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text that ends the answer; may be repeated.")
    ] = None,
    max_length: Annotated[
        int, typer.Option(min=2, help="Tokens of prompt and answer together; limited by the model's context.")
    ] = 2048,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="float32|bfloat16|float16", help="Dtype of the weights; float32 on a CPU unless given."),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Number of devices that share the model.")] = 1,
    quantize: Annotated[
        str,
        typer.Option(
            metavar="auto|none|stored|fp8|int8|int4",
            help="Packing of the weights: as the files have them (stored), or made when they are loaded.",
        ),
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="auto|fp8", help="Dtype of the KV cache; auto is that of the weights.")
    ] = "auto",
    speculative_config: Speculation = None,
) -> None:
    """Answer a prompt, or one turn after another, as a stream; tokens per second go to stderr."""
    from fullstride.llm.engine import EngineConfig
    from fullstride.llm.engine.build import select_kernels
    from fullstride.llm.llm import LLM, load_for_engine
    from fullstride.llm.sampling_params import SamplingParams

    settings: dict[str, Any] = {
        "dtype": dtype,
        "quantize": quantize,
        "kv_cache_dtype": kv_cache_dtype,
        "tensor_parallel_size": tensor_parallel_size,
    }
    if speculative_config is not None:
        settings["speculative_config"] = as_json("--speculative-config", speculative_config)
    config = EngineConfig(**settings)
    loaded = load_for_engine(model, config)
    # Refuse impossible settings before anything is compiled.
    select_kernels(loaded.config, config)
    texts = [_read() if text == "-" else text for text in prompt]
    talk = Conversation(loaded.tokenizer, system, raw, len(texts))
    first = talk.ids(texts[0])
    # One sequence needs fewer programs, and a KV cache of its own length.
    length = min(max_length, loaded.config.max_position)
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
        max_tokens=max_tokens or _room(length, first),
    )
    _check_length(len(first), max_tokens, length, loaded.config.max_position)
    llm = LLM(
        loaded,
        max_sequences=1,
        max_length=length,
        kv_blocks=-(-length // 16),
        **settings,
    )
    for number, text in enumerate(texts):
        if len(texts) > 1:
            typer.echo(f"{chr(10) if number else ''}> {text}\n")
        ids = talk.ids(text) if number else first
        talk.answered(text, _answer(llm, ids, replace(params, max_tokens=max_tokens or _room(length, ids))))


def _read() -> str:
    """Read the prompt from stdin.

    Raises:
        ConfigError: if it is closed.

    """
    if sys.stdin is None:
        raise ConfigError("PROMPT=-: stdin is closed; expected a prompt from it; pass the prompt itself instead")
    return sys.stdin.read()


def _check_length(prompt: int, max_tokens: int | None, most: int, longest: int) -> None:
    """Check that the prompt is not empty, and that it and its answer fit a sequence.

    Raises:
        ConfigError: if they do not.

    """
    from fullstride.llm.engine.validate import total_length

    try:
        total_length(prompt, max_tokens, most)
    except ConfigError as error:
        advice = f"; --max-length takes up to this model's {longest}" if prompt else ""
        raise ConfigError(f"{error}{advice}") from None


def _room(length: int, ids: list[int]) -> int:
    return max(1, min(MOST_TOKENS, length - len(ids)))


class Conversation:
    """Conversation so far, in the form that the model reads."""

    def __init__(self, tokenizer: "Tokenizer", system: str, raw: bool, turns: int):
        """Start a conversation.

        Raises:
            ConfigError: for `--raw` with options that need a template, or for a model without a template.

        """
        if raw and system:
            raise ConfigError("--raw and --system are both given: a system message needs the chat template")
        if raw and turns > 1:
            raise ConfigError(f"--raw with {turns} prompts: several turns need the chat template; give one prompt")
        if not raw and tokenizer.template is None:
            raise ConfigError("this model has no chat template: give --raw to continue the prompt itself")
        self._tokenizer, self._raw = tokenizer, raw
        self._messages = [{"role": "system", "content": system}] if system else []

    def ids(self, text: str) -> list[int]:
        """Return the token ids of the conversation with the user's next message."""
        if self._raw:
            return self._tokenizer.encode(text)
        asked = self._tokenizer.chat([*self._messages, {"role": "user", "content": text}])
        return self._tokenizer.encode(asked, special=False)

    def answered(self, text: str, answer: str) -> None:
        """Add a turn to the conversation."""
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def _answer(llm: "LLM", ids: list[int], params) -> str:
    started, first, tokens = time.perf_counter(), None, 0
    answer, last = "", None
    for last in llm.stream(ids, params):
        first = first or (time.perf_counter(), len(last.token_ids))
        tokens += len(last.token_ids)
        answer += last.text
        typer.echo(last.text, nl=False)
    typer.echo()
    _report(len(ids), tokens, started, first, last)
    return answer


def _report(prompt: int, tokens: int, started: float, first: tuple[float, int] | None, last: "Delta | None") -> None:
    """Report the times on stderr; the rate counts the tokens after the first ones."""
    if first is None or last is None:
        return
    at, count = first
    rest = tokens - count
    rate = f", then {rest / (time.perf_counter() - at):.1f} tokens/s" if rest else ""
    typer.echo(
        f"{prompt} tokens in, {tokens} out ({last.finish_reason}); first after {at - started:.2f} s{rate}", err=True
    )
