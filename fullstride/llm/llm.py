"""Offline inference from Python, with the interface of vLLM and nano-vllm."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fullstride.errors import ConfigError, one_of
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.outputs import (
    CompletionOutput,
    Delta,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Pooling,
    RequestOutput,
    ScoreOutput,
)
from fullstride.llm.pooling import EMBEDDING, embedding_of
from fullstride.llm.progress import OnProgress, starting
from fullstride.llm.prompts import Message, Prompt, conversations, is_batch, normalize, token_ids
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.scoring import SCORING, joined, scored
from fullstride.llm.text.json_schema import supported
from fullstride.llm.text.messages import plain_messages
from fullstride.llm.vllm_names import DIFFERENT, ENGINE
from fullstride.process.progress import Progress
from fullstride.renamed import own_names
from fullstride.runs.atomic_files import note

if TYPE_CHECKING:
    from fullstride.llm.weights import LoadedModel

logger = logging.getLogger(__name__)


def load_for_engine(source: str | Path, config: EngineConfig) -> "LoadedModel":
    """Load a model for an engine; quantized weights are read directly in the dtype of the computation."""
    import jax

    from fullstride.llm.engine.shapes import dtype_for
    from fullstride.llm.weights import load

    return load(source, dtype=dtype_for(config, jax.default_backend(), "") or None)


class LLM:
    """Language model with its own engine.

    Attributes:
        engine: see `fullstride.llm.engine.Engine`.
        tokenizer: the model's.

    """

    def __init__(
        self,
        source: "str | Path | LoadedModel",
        *,
        progress: bool = True,
        adapters: Mapping[str, str | Path] | None = None,
        **engine_config: Any,
    ):
        """Load a model and compile the engine.

        Args:
            source: see `fullstride.llm.weights.load`; or what it returned.
            progress: say on stderr that weights are loaded and how many programs are compiled; False is silent.
            adapters: folders of LoRA adapters in PEFT's form by names of your own; see `Engine.load_adapter` for more.
            **engine_config: see `EngineConfig`.

        Raises:
            ConfigError: for a model, an adapter or settings that cannot be.

        """
        for name in own_names(engine_config, ENGINE, different=DIFFERENT):
            one_of("setting of the engine", name, [field.name for field in fields(EngineConfig)])
        config = EngineConfig(**engine_config)
        from fullstride.llm.weights import LoadedModel

        if not isinstance(source, str | Path | LoadedModel):
            expected = "a path, a name, or the result of fullstride.llm.weights.load"
            raise ConfigError(f"model={source!r:.80}: expected {expected}")
        loaded = source if isinstance(source, LoadedModel) else load_for_engine(source, config)
        name = source.path.name if isinstance(source, LoadedModel) else str(source)
        with starting(name, note if progress else lambda _: None) as start:
            self.engine = Engine(loaded, config, start.programs, loading=start.weights, adapters=adapters)
        self.tokenizer, self._sampling = loaded.tokenizer, loaded.sampling
        self._requests = 0

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters: the model's own, else the package's; the name is vLLM's."""
        return SamplingParams(**self._sampling)  # pyright: ignore[reportArgumentType]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, as many at once as the engine runs.

        Args:
            prompts: a text or token ids, or several; vLLM's `{"prompt": ...}` and `{"prompt_token_ids": ...}` are
                taken, too.
            sampling_params: for all prompts, or one per prompt; by default `get_default_sampling_params()`.
            use_tqdm: show a progress bar on stderr; the name is vLLM's, the bar is rich's.
            adapter: name of a loaded LoRA adapter for all prompts, or one for each, None for the model itself.

        Returns:
            An output for each prompt, in order.

        Raises:
            ConfigError: if a prompt can never run, and nothing is run then; or while a stream is under way.
            RuntimeError: if a step failed; the message is the device's.

        """
        each = is_batch(prompts)
        outputs = self._add(each, self._each(sampling_params, len(each)), _adapters(adapter, len(each)))
        with Progress("generating", len(outputs), brief=True, shown=use_tqdm) as progress:
            self._run(outputs, progress.at)
        return list(outputs.values())

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate the assistant's next message in one conversation or several; see `generate`.

        Args:
            messages: dicts with `role` and `content`, as in OpenAI's API; see `plain_messages`.
            sampling_params: for all conversations, or one per conversation.
            tools: JSON schemas of functions that the template shows to the model.
            chat_template_kwargs: other variables of the template, such as Qwen3's `enable_thinking`.
            use_tqdm: see `generate`.
            adapter: see `generate`.

        Raises:
            ConfigError: see `generate`, `plain_messages` and `Tokenizer.chat`.
            RuntimeError: see `generate`.

        """
        more = chat_template_kwargs or {}
        every = [plain_messages(conversation) for conversation in conversations(messages)]
        texts = [self.tokenizer.chat(conversation, tools, **more) for conversation in every]
        ids = [self.tokenizer.encode(text, special=False) for text in texts]
        found = self.generate(ids, sampling_params, use_tqdm=use_tqdm, adapter=adapter)
        for output, text in zip(found, texts, strict=True):
            output.prompt = text
        return found

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed prompts by the model's last hidden states, after the final norm.

        Args:
            prompts: see `generate`; each may have one token less than the longest sequence.
            pooling: the `last` token's, or the `mean` of all tokens.
            normalize: whether to divide by the Euclidean norm.
            use_tqdm: see `generate`.
            adapter: see `generate`.

        Raises:
            ConfigError: see `generate`.
            RuntimeError: see `generate`.

        """
        one_of("pooling", pooling, get_args(Pooling))
        each = is_batch(prompts)
        outputs = self._add(each, [EMBEDDING] * len(each), _adapters(adapter, len(each)), pooling)
        with Progress("embedding", len(outputs), brief=True, shown=use_tqdm) as progress:
            vectors = self._run(outputs, progress.at)
        return [
            EmbeddingRequestOutput(
                name, output.prompt, output.prompt_token_ids, EmbeddingOutput(embedding_of(vectors[name], normalize))
            )
            for name, output in outputs.items()
        ]

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[ScoreOutput]:
        """Return the log likelihood of each continuation after its prompt, as lm-eval's `loglikelihood` has it.

        vLLM's `score` is of models that compare two texts; for its cosine of two embeddings multiply those of `embed`.

        Args:
            prompts: one for all continuations, or one for each; a text or token ids. Spaces at the end of a text are
                counted to the continuation.
            continuations: of the same kind as their prompts.
            use_tqdm: see `generate`.
            adapter: see `generate`.

        Raises:
            ConfigError: see `generate`; or if a prompt or a continuation has no tokens.
            RuntimeError: see `generate`.

        """
        first, second = is_batch(prompts), is_batch(continuations)
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second):
            raise ConfigError(f"{len(first)} prompts for {len(second)} continuations: give one prompt, or one for each")
        pairs = [joined(self.tokenizer, *pair) for pair in zip(first, second, strict=True)]
        found = self.generate([whole for whole, _ in pairs], SCORING, use_tqdm=use_tqdm, adapter=adapter)
        return [scored(output, start) for output, (_, start) in zip(found, pairs, strict=True)]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[Delta]:
        """Complete one prompt, a delta at a time; leaving the loop early ends the request.

        Raises:
            ConfigError: see `generate`.
            RuntimeError: if a step failed, after the delta that ends the completion.

        """
        outputs = self._add([prompt], [sampling_params or self.get_default_sampling_params()], [adapter])
        try:
            for deltas in self._steps():
                for delta in deltas:
                    yield delta
                    if delta.error:
                        raise RuntimeError(delta.error)
        finally:
            self._drop(outputs)

    def _each(self, params: Any, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * count
        if not (isinstance(params, Sequence) and all(isinstance(each, SamplingParams) for each in params)):
            raise ConfigError(f"sampling_params={params!r}: expected SamplingParams(...), or a list of them")
        if len(params) != count:
            raise ConfigError(f"{len(params)} sampling parameters for {count} prompts: give one, or one for each")
        return list(params)

    def _add(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        adapters: Sequence[str | None],
        pooling: Pooling | None = None,
    ) -> dict[str, RequestOutput]:
        if self.engine.busy:
            raise ConfigError("a stream is under way: read it to its end or close it; an Engine runs several at once")
        outputs: dict[str, RequestOutput] = {}
        try:
            for prompt, asked, adapter in zip(map(normalize, prompts), params, adapters, strict=True):
                text = prompt if isinstance(prompt, str) else None
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
                name, self._requests = str(self._requests), self._requests + 1
                self.engine.add(name, ids, asked, adapter=adapter, pooling=pooling)
                completions = [CompletionOutput(index) for index in range(asked.n)]
                outputs[name] = RequestOutput(name, text, ids, completions)
        except ConfigError as error:
            self._drop(outputs)
            raise ConfigError(f"prompt {len(outputs)}: {error}") from None
        except BaseException:
            self._drop(outputs)
            raise
        _warn(params)
        return outputs

    def _run(self, outputs: dict[str, RequestOutput], tell: OnProgress) -> dict[str, Any]:
        """Run requests to their end, merge their deltas into the outputs, and return the embeddings."""
        failed, vectors = "", {}
        try:
            for deltas in self._steps():
                for delta in deltas:
                    outputs[delta.request_id].add(delta)
                    if delta.embedding is not None:
                        vectors[delta.request_id] = delta.embedding
                    failed = failed or delta.error
                tell(sum(output.finished for output in outputs.values()), len(outputs))
        finally:
            self._drop(outputs)
        if failed:
            raise RuntimeError(failed)
        return vectors

    def _steps(self) -> Iterator[list[Delta]]:
        """Deltas of each step until nothing is left; a step that is interrupted (Ctrl-C) leaves no request behind."""
        while self.engine.busy:
            try:
                deltas = self.engine.step()
            except BaseException:
                self.engine.clear()
                raise
            yield deltas

    def _drop(self, names: Iterable[str]) -> None:
        """Abort all requests that have not ended."""
        for name in names:
            self.engine.abort(name)
        for _ in self._steps():
            pass


def _adapters(adapter: str | Sequence[str | None] | None, count: int) -> Sequence[str | None]:
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if len(adapter) != count:
        raise ConfigError(f"{len(adapter)} adapters for {count} prompts: give one, or one for each")
    return adapter


def _warn(params: Iterable[SamplingParams]) -> None:
    """Warn about parts of a schema that no grammar enforces."""
    for shape in dict.fromkeys(asked.structured_outputs for asked in params):
        if shape is not None and shape.kind == "json_schema" and (parts := supported(json.loads(shape.value)).left_out):
            logger.warning(
                "no grammar enforces %s of the schema: check whether the texts conform to it", ", ".join(parts)
            )
