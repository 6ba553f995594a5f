"""Drafts of a smaller model of the same vocabulary, which runs in an engine of its own."""

from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import jax

from fullstride.errors import ConfigError
from fullstride.llm.engine.build import Model
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.engine.engine import Engine
from fullstride.llm.engine.sequence import Request, Sequence, StopTextBuffer
from fullstride.llm.engine.shapes import VERIFIED
from fullstride.llm.engine.speculative_config import SpeculativeConfig

# Share of an accelerator's free memory that its KV cache takes; the model that verifies has the rest.
KV_SHARE = 0.1


class DraftModel:
    """Drafts of a smaller model, drawn from the noise of the model that verifies them, so that both agree often.

    It continues a sequence from the tokens that its prefix cache holds. Penalties, biases and adapters do not apply.
    """

    free = False

    def __init__(self, engine: Engine):
        """Draft with this engine."""
        self._engine = engine

    def draft(self, sequences: Several[Sequence], counts: Several[int]) -> list[list[int]]:
        """Return a draft for each sequence: as many tokens as its count, or none where the sequence is too long."""
        engine, drafts = self._engine, [list[int]() for _ in sequences]
        if engine.dead is not None:
            return drafts
        if engine.busy:  # a step was interrupted
            engine.clear()
        longest = min(engine.sizes.max_length, engine.sizes.holds)
        for number, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            if count > 0 and len(sequence.tokens) + count <= longest:
                engine.submit([_continued(str(number), sequence, count, engine.sizes.block)])
        while engine.busy:
            for delta in engine.step():
                drafts[int(delta.request_id)] += delta.token_ids
        return drafts


def _continued(name: str, sequence: Sequence, count: int, block: int) -> Sequence:
    """Return a sequence that goes on where another one is, from the same random key."""
    params = replace(
        sequence.request.params,
        n=1, max_tokens=count, min_tokens=0, stop=None, stop_token_ids=None, ignore_eos=True, seed=None,
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=None,
        logprobs=None, prompt_logprobs=None, structured_outputs=None, bad_words=None,
    )  # fmt: skip
    tokens = list(sequence.tokens)
    request = Request(name, tokens, params, len(tokens) + count, (), cache_key=sequence.request.cache_key)
    drafted = Sequence(request, 0, list(tokens), sequence.key, StopTextBuffer(None))
    drafted.block_hashes = list(sequence.digests(block))
    return drafted


def load_draft_model(
    config: SpeculativeConfig, settings: EngineConfig, target: Model, devices: Several[Any] | None
) -> DraftModel:
    """Load a draft model, and compile its engine.

    Args:
        config: names the draft model.
        settings: those of the engine that verifies.
        target: the model that verifies.
        devices: JAX devices of the engine that verifies.

    Raises:
        ConfigError: for a model that cannot be loaded or run, or that has another vocabulary.

    """
    from fullstride.llm.engine.shapes import dtype_for
    from fullstride.llm.weights import load

    platform = jax.default_backend()
    loaded = load(config.model or "", dtype=dtype_for(settings, platform, "") or None)
    check_vocabulary(config, loaded, target)
    rows = max(1, min(settings.max_sequences or VERIFIED, VERIFIED // (config.num_speculative_tokens + 1)))
    length = None if settings.max_length is None else min(settings.max_length, loaded.config.max_position)
    own = replace(
        settings,
        speculative_config=None,
        kv_blocks=None,
        kv_memory=None,
        kv_share=None if platform == "cpu" else KV_SHARE,
        max_sequences=rows,
        max_tokens_per_step=None,
        max_length=length,
        steps_per_dispatch=max(1, config.num_speculative_tokens - 1),
        kernels="auto",
        quantize="auto",
        prefix_cache=True,
        max_loras=0,
        max_cpu_loras=None,
    )
    return DraftModel(Engine(replace(loaded, tokenizer=None), own, devices=devices))


def check_vocabulary(config: SpeculativeConfig, draft: Any, target: Model) -> None:
    """Check that both models mean the same tokens by the same ids.

    Raises:
        ConfigError: if they do not.

    """
    sizes = draft.config.vocab_size, target.config.vocab_size
    words = [model.tokenizer.backend.get_vocab() for model in (draft, target) if model.tokenizer is not None]
    other = len(words) == 2 and words[0] != words[1]
    if sizes[0] != sizes[1] or other:
        found = "other tokens" if sizes[0] == sizes[1] else f"{sizes[0]} tokens instead of {sizes[1]}"
        named = f"speculative_config: model={config.model}"
        raise ConfigError(f"{named}: its vocabulary has {found}: expected a draft model of the same vocabulary")
