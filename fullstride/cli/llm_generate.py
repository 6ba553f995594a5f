"""`fullstride llm generate`: a prompt, or the turns of a conversation, answered as it is written."""

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

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
            help="The user's message; - reads it from stdin. More of them are the next turns of one conversation.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(metavar="NAME|PATH", help="A folder with config.json and safetensors, a GGUF file, a name."),
    ] = "smollm2",
    system: Annotated[str, typer.Option(help="A message that comes before the user's.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Go on with the prompt itself, without a template.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of the answer; 512, or as many as fit, unless given.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most probable token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Smallest set of tokens with this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="The k most probable tokens; 0 takes all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="The same answer again; another each time unless given.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends the answer; may be repeated.")] = None,
    max_length: Annotated[
        int, typer.Option(min=2, help="Of prompt and answer; at most the model's, which a smaller one leaves alone.")
    ] = 2048,
    dtype: Annotated[
        str | None, typer.Option(metavar="float32|bfloat16|float16", help="Of weights; float32 on a CPU unless given.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Devices that share the model.")] = 1,
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="auto|fp8", help="Of keys and values; auto is that of the weights.")
    ] = "auto",
) -> None:
    """Answer a prompt, or one turn after another, streaming; tokens a second go to stderr."""
    from fullstride.llm.engine import EngineConfig
    from fullstride.llm.engine.build import select_kernels
    from fullstride.llm.llm import LLM, load_for_engine
    from fullstride.llm.sampling_params import SamplingParams

    settings = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "tensor_parallel_size": tensor_parallel_size}
    config = EngineConfig(**settings)
    loaded = load_for_engine(model, config)
    # Whatever is refused is refused before anything is compiled.
    select_kernels(loaded.config, config)
    texts = [_read() if text == "-" else text for text in prompt]
    talk = Conversation(loaded.tokenizer, system, raw, len(texts))
    first = talk.ids(texts[0])
    # One sequence needs fewer programs, and a pool of its own length.
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
        raise ConfigError("PROMPT=-: stdin is closed; expected a text from it, or give the text itself")
    return sys.stdin.read()


def _check_length(prompt: int, max_tokens: int | None, most: int, longest: int) -> None:
    """See that there is a prompt, of so many tokens, and that it and its answer fit a sequence.

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
    """A conversation so far, as a model reads it."""

    def __init__(self, tokenizer: "Tokenizer", system: str, raw: bool, turns: int):
        """Begin one.

        Raises:
            ConfigError: for `--raw` beside what needs a template, or a model that has none.

        """
        if raw and system:
            raise ConfigError("--raw and --system are both given: a system message needs the template")
        if raw and turns > 1:
            raise ConfigError(f"--raw with {turns} prompts: turns of a conversation need the template; give one prompt")
        if not raw and tokenizer.template is None:
            raise ConfigError("this model has no chat template: give --raw to go on with the prompt itself")
        self._tokenizer, self._raw = tokenizer, raw
        self._messages = [{"role": "system", "content": system}] if system else []

    def ids(self, text: str) -> list[int]:
        """The conversation with the user's next message, to be answered."""
        if self._raw:
            return self._tokenizer.encode(text)
        asked = self._tokenizer.chat([*self._messages, {"role": "user", "content": text}])
        return self._tokenizer.encode(asked, special=False)

    def answered(self, text: str, answer: str) -> None:
        """Keep a turn."""
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
    """How long it took; the rate is of the tokens after the first ones."""
    if first is None or last is None:
        return
    at, count = first
    rest = tokens - count
    rate = f", then {rest / (time.perf_counter() - at):.1f} tokens/s" if rest else ""
    typer.echo(
        f"{prompt} tokens in, {tokens} out ({last.finish_reason}); first after {at - started:.2f} s{rate}", err=True
    )
