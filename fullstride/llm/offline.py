"""Prompts in, completions out: the engine for use from Python, with nano-vllm's and vLLM's interface."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.outputs import CompletionOutput, Delta, RequestOutput
from fullstride.llm.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@contextlib.contextmanager
def bar(title: str, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, to be called with how many of how many are done; where nobody looks there is none."""
    if not (shown and sys.stderr.isatty()):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class LLM:
    """A model with an engine of its own.

    Attributes:
        engine: see `fullstride.llm.engine.Engine`.
        tokenizer: the model's.

    """

    def __init__(self, source: str | Path, *, progress: bool = True, **engine_config: Any):
        """Load a model and compile the engine.

        Args:
            source: see `fullstride.llm.weights.load`.
            progress: show a bar while programs are compiled.
            **engine_config: see `EngineConfig`.

        Raises:
            ConfigError: for a model or settings that cannot be.

        """
        import jax

        from fullstride.llm.engine.sizes import dtype_for
        from fullstride.llm.weights import load

        config = EngineConfig(**engine_config)
        # Quantised weights are read as what they will be computed in, not by way of something coarser.
        loaded = load(source, dtype=dtype_for(config, jax.default_backend(), "") or None)
        with bar("compiling", progress) as tell:
            self.engine = Engine(loaded, config, tell)
        self.tokenizer = loaded.tokenizer
        self._requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, as many at once as the engine takes.

        Args:
            prompts: text or token ids, one or several.
            params: for all, or for each; by default `SamplingParams()`.
            progress: show a bar.

        Returns:
            One output for each prompt, in order.

        Raises:
            ConfigError: if a prompt can never run; nothing is run then.
            RuntimeError: if a step failed; the message is the device's.

        """
        several = _several(prompts)
        asked = _each(params, len(several))
        outputs = self._add(several, asked)
        with bar("generating", progress) as tell:
            self._run(outputs, tell)
        return list(outputs.values())

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """The assistant's next message in one conversation or several; see `generate`."""
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self.tokenizer.chat(conversation, tools) for conversation in several]  # type: ignore[arg-type]
        found = self.generate([self.tokenizer.encode(text, special=False) for text in texts], params, progress=progress)
        for output, text in zip(found, texts, strict=True):
            output.prompt = text
        return found

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt, a delta at a time; leaving the loop early ends the request."""
        (name,) = self._add([prompt], [params or SamplingParams()])
        try:
            while self.engine.busy:
                yield from (delta for delta in self.engine.step() if delta.request_id == name)
        finally:
            self.engine.abort(name)
            while self.engine.busy:
                self.engine.step()

    def _add(self, prompts: list[Prompt], params: list[SamplingParams]) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        try:
            for prompt, asked in zip(prompts, params, strict=True):
                text = prompt if isinstance(prompt, str) else None
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                name, self._requests = str(self._requests), self._requests + 1
                self.engine.add(name, ids, asked)
                completions = [CompletionOutput(index) for index in range(asked.n)]
                outputs[name] = RequestOutput(name, text, ids, completions)
        except ConfigError as error:
            for name in outputs:
                self.engine.abort(name)
            while self.engine.busy:
                self.engine.step()
            raise ConfigError(f"prompt {len(outputs)}: {error}") from None
        return outputs

    def _run(self, outputs: dict[str, RequestOutput], tell: Callable[[int, int], None]) -> None:
        failed = ""
        while self.engine.busy:
            for delta in self.engine.step():
                merge(outputs[delta.request_id], delta)
                failed = failed or delta.error
            tell(sum(output.finished for output in outputs.values()), len(outputs))
        if failed:
            raise RuntimeError(failed)


def merge(output: RequestOutput, delta: Delta) -> None:
    """Put what is new in its place."""
    completion = output.outputs[delta.index]
    completion.text += delta.text
    completion.token_ids += delta.token_ids
    if delta.logprobs is not None:
        completion.logprobs = [*(completion.logprobs or ()), *delta.logprobs]
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = list(delta.prompt_logprobs)
    output.cached_tokens = max(output.cached_tokens, delta.cached_tokens)
    if delta.finish_reason is not None:
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        output.finished = all(other.finish_reason for other in output.outputs)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling parameters for {count} prompts: give one, or one for each")
    return list(params)
