"""Correctness check of `benchmarks llm`: greedy answers and their logprobs compared with a dense fp32 pass.

The dense pass is a decoder of whole sequences, layer by layer, without a KV cache or kernels.
"""

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from benchmarks.cases.llm.devices import MadeParameters
from benchmarks.cases.llm.shared import run_all, tokens_of
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import Engine
from fullstride.llm.engine.programs import TOP
from fullstride.llm.kernels.interface import FP8_POOL
from fullstride.llm.models.rope import angles, frequencies, magnitude, window_frequencies
from fullstride.llm.outputs import Logprob
from fullstride.llm.sampling_params import SamplingParams
from fullstride.measure.gate import GateError

Layer = dict[str, Array]
# Tokens of an answer: the first from the prompt's step, then a burst of decode steps.
ANSWER = 9
# Nats by which logprobs may be off, root mean square, by dtype: three to five times what SmolLM2 is off by on a CPU,
# but for fp32, which is TF32 on a GPU. A choice may cost twice as many. A model that computes something else is off by
# 1 and more.
LIMITS = {"float32": 0.02, "float16": 0.04, "bfloat16": 0.25}
FP8_LIMIT = 0.6
# Of GPT-OSS's activation.
SWIGLU_ALPHA = 1.702
# Tokens of an answer, and the logprobs of each if requested.
Answer = tuple[list[int], list[tuple[Logprob, ...]]]


class Dense:
    """Dense fp32 model with weights rounded as the engine's; one layer at a time is on the device."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, Any], dtype: str, device: Any):
        self._config = config
        self._parameters = parameters
        self._dtype = dtype
        self._device = device
        self._parts: dict[str, list[str]] = {}
        for name in parameters:
            _, number, part = (*name.split(".", 2), "", "")[:3]
            self._parts.setdefault(number, []).append(part)

    def logprobs(self, sequences: Sequence[Sequence[int]], count: int) -> list[Float32[np.ndarray, "count vocab"]]:
        """Return the logprobs of the last `count` tokens of each sequence, given all tokens before them."""
        config, embed = self._config, self._get("embed")
        scale = np.asarray(config.embedding_scale, self._dtype if config.rounded_scale else np.float32)
        states = [embed[jnp.asarray(sequence[:-1])] * scale.astype(np.float32) for sequence in sequences]
        with jax.default_matmul_precision("highest"):
            for number in range(config.layers):
                layer = {part: self._get(f"layers.{number}.{part}") for part in self._parts[str(number)]}
                run = _layer(config, config.window(number), number not in config.unrotated)
                states = [run(layer, x) for x in states]
            head, norm = embed if config.tied else self._get("head"), self._get("norm")
            last = [_norm(config, x[-count:], norm) @ head.T / config.logit_divisor for x in states]
            last = [_capped(x, config.logit_cap) for x in last]
        return [np.asarray(jax.nn.log_softmax(x)) for x in last]

    def _get(self, name: str) -> Float[Array, "..."]:
        if isinstance(self._parameters, MadeParameters):  # which are slow to bring to the host
            value = self._parameters.make(name, self._device)
        else:
            value = jax.device_put(self._parameters[name], self._device)
        return value.astype(self._dtype).astype(jnp.float32)


@functools.cache
def _layer(config: ModelConfig, window: int | None, rotated: bool) -> Any:
    """Return a layer of a kind, compiled once per sequence length."""

    def apply(layer: Layer, x: Float[Array, "T hidden"]) -> Float[Array, "T hidden"]:
        mixed = _attention(config, layer, _through(config, layer, "attn_norm", x), window, rotated)
        x = x + config.residual_scale * _through(config, layer, "attn_post_norm", mixed)
        h = _through(config, layer, "mlp_norm", x)
        out = _experts(config, layer, h) if config.experts else _mlp(config, layer, "", h)
        return x + config.residual_scale * _through(config, layer, "mlp_post_norm", out)

    return jax.jit(apply)


def _through(config: ModelConfig, layer: Layer, name: str, x: Float[Array, "*T width"]) -> Float[Array, "*T width"]:
    """Through a norm, if the layer has it."""
    return _norm(config, x, layer[name]) if name in layer else x


def _norm(config: ModelConfig, x: Float[Array, "*T width"], weight: Float[Array, " width"]) -> Float[Array, "*T width"]:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + config.rms_eps) * (config.norm_offset + weight)


def _mlp(config: ModelConfig, layer: Layer, prefix: str, x: Float[Array, "T hidden"]) -> Float[Array, "T hidden"]:
    wide, up = (_linear(layer, f"{prefix}{name}", x) for name in ("gate", "up"))
    if config.activation == "swiglu_clamped":
        limit = config.swiglu_limit
        wide, up = jnp.minimum(wide, limit), jnp.clip(up, -limit, limit) + 1
        active = wide / (1 + jnp.exp(-SWIGLU_ALPHA * wide))
    else:
        active = jax.nn.silu(wide) if config.activation == "silu" else jax.nn.gelu(wide, approximate=True)
    return _linear(layer, f"{prefix}down", active * up)


def _linear(layer: Layer, name: str, x: Float[Array, "T inner"]) -> Float[Array, "T out"]:
    y = x @ layer[name].T
    return y + layer[f"{name}_bias"] if f"{name}_bias" in layer else y


def _experts(config: ModelConfig, layer: Layer, x: Float[Array, "T hidden"]) -> Float[Array, "T hidden"]:
    """All experts of all tokens; those that a token does not choose weigh nothing."""
    shares = jax.nn.softmax(_linear(layer, "router", x))
    least = jnp.sort(shares)[:, -config.experts_per_token, None]
    chosen = jnp.where(shares >= least, shares, 0)
    weights = chosen / chosen.sum(1, keepdims=True) if config.shared_weights else chosen
    parts = (weights[:, i, None] * _mlp(config, layer, f"experts.{i}.", x) for i in range(config.experts))
    return sum(parts, jnp.zeros_like(x))


def _attention(
    config: ModelConfig, layer: Layer, x: Float[Array, "T hidden"], window: int | None, rotated: bool
) -> Float[Array, "T hidden"]:
    q, k, v = (_heads(config, layer, name, x) for name in "qkv")
    if rotated:
        q, k = (_rotated(config, each, window) for each in (q, k))
    shared, places = config.heads // config.kv_heads, jnp.arange(len(x))
    seen = places <= places[:, None]
    if window is not None:
        seen &= places > places[:, None] - window
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale

    def head(number):  # one at a time: the scores of a long sequence fill a device
        own = number // shared
        scores = _capped(q[:, number] @ k[:, own].T * scale, config.attention_cap)
        scores = jnp.where(seen, scores, -jnp.inf)
        if config.sinks:
            scores = jnp.concatenate([scores, jnp.full((len(x), 1), layer["sinks"][number])], axis=1)
        return jax.nn.softmax(scores)[:, : len(x)] @ v[:, own]

    mixed = lax.map(head, jnp.arange(config.heads))
    return _linear(layer, "o", mixed.swapaxes(0, 1).reshape(len(x), -1))


def _capped(x: Array, cap: float | None) -> Array:
    return x if cap is None else jnp.tanh(x / cap) * cap


def _heads(config: ModelConfig, layer: Layer, name: str, x: Float[Array, "T hidden"]) -> Float[Array, "T heads wide"]:
    y = _linear(layer, name, x)
    if config.wide_qk_norm:
        y = _through(config, layer, f"{name}_norm", y)
    y = y.reshape(len(x), -1, config.head_dim)
    return y if config.wide_qk_norm else _through(config, layer, f"{name}_norm", y)


def _rotated(config: ModelConfig, x: Float[Array, "T heads wide"], window: int | None) -> Array:
    own, places = None if window is None else window_frequencies(config), jnp.arange(len(x))
    cos, sin = angles(places, frequencies(config), magnitude(config)) if own is None else angles(places, own)
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def gate(
    engine: Engine, parameters: Mapping[str, Any], lengths: Sequence[int], at_once: int, name: str = ""
) -> dict[str, float]:
    """Return the errors of an idle engine for the shortest and the longest of several prompts.

    Each prompt is answered alone with logprobs; then several at once without, by the programs that are timed.

    `lengths` are in tokens, and `name` is the engine's if a result has several. GateError if logprobs are off by
    more than the limit of the engine's dtype, or a greedy token is less probable than the most probable one by more
    than twice that.
    """
    answer = min(ANSWER, engine.sizes.max_length - 1)
    prompts = _prompts(engine, lengths, answer)
    alone = [_answers(engine, [prompt], answer, logprobs=TOP)[0] for prompt in prompts]
    crowd = [prompts[0]] * (at_once - 1) + [prompts[-1]]
    answers = [*alone, *_answers(engine, crowd, answer, logprobs=None)]
    sequences = [(*prompt, *tokens) for prompt, (tokens, _) in zip([*prompts, *crowd], answers, strict=True)]
    distinct = list(dict.fromkeys(sequences))  # engines give many prompts the same answer
    dense = Dense(engine.model, parameters, engine.sizes.dtype, engine.devices[0])
    expected = dict(zip(distinct, dense.logprobs(distinct, answer), strict=True))
    told = [(expected[sequence], places) for sequence, (_, places) in zip(sequences, alone, strict=False)]
    greedy = [(places, places[range(answer), sequence[-answer:]]) for sequence, places in expected.items()]
    shortfall = max(float((places.max(1) - taken).max()) for places, taken in greedy)
    limit = FP8_LIMIT if engine.sizes.pool == FP8_POOL else LIMITS[engine.sizes.dtype]
    after = f", {name}" if name else ""
    error, chosen = f"error of logprobs{after}", f"greedy tokens' shortfall, {at_once} at once{after}"
    return {error: _judged(error, _error(told), limit), chosen: _judged(chosen, shortfall, 2 * limit)}


def _prompts(engine: Engine, lengths: Sequence[int], answer: int) -> list[list[int]]:
    most, vocab, draw = engine.sizes.max_length - answer, engine.model.vocab_size, random.Random("gate")
    wanted = dict.fromkeys(max(1, min(length, most)) for length in (min(lengths), max(lengths)))
    return [[draw.randrange(min(3, vocab - 1), vocab) for _ in range(length)] for length in wanted]


def _answers(engine: Engine, prompts: list[list[int]], count: int, logprobs: int | None) -> list[Answer]:
    params = SamplingParams(temperature=0.0, max_tokens=count, logprobs=logprobs, ignore_eos=True)
    found = run_all(engine, prompts, [params] * len(prompts))
    return [(tokens_of(own), [place for delta in own for place in delta.logprobs or ()]) for own in found]


def _error(told: list[tuple[np.ndarray, list[tuple[Logprob, ...]]]]) -> float:
    errors = [
        expected[each.token] - each.logprob
        for logprobs, places in told
        for expected, place in zip(logprobs, places, strict=True)
        for each in place
    ]
    return float(np.sqrt(np.mean(np.square(errors))))


def _judged(what: str, value: float, limit: float) -> float:
    if not value <= limit:  # nor if it is not a number
        raise GateError(f"{what}: {value:.3g} nats from a dense pass in fp32, expected at most {limit:g}; not timed")
    return value
