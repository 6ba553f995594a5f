"""BERT (arXiv:1810.04805) and its relatives as an Equinox module: an encoder, a tied head, a pooler."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fullstride.bert.model.attention import Lengths, Segments, mixed
from fullstride.bert.model.config import BertConfig
from fullstride.bert.model.heads import Heads
from fullstride.bert.model.layers import Dense, Dropout, Embedding, Hidden, Key, LayerNorm, gelu, keys_of
from fullstride.bert.model.modern import ModernLayer
from fullstride.errors import ConfigError
from fullstride.step.jax.precision import wide


class Head(eqx.Module):
    """Dense, GELU and LayerNorm, then a product with the token embedding, plus a bias."""

    dense: Dense
    norm: LayerNorm
    bias: Float[Array, " vocab"]

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        """Random weights, biases of 0; ModernBERT's has that of the scores alone."""
        size, bias = config.hidden_size, not config.modern
        self.dense = Dense(size, size, std=config.initializer_std, key=key, bias=bias)
        self.norm = LayerNorm(size, eps=config.norm_eps, bias=bias)
        self.bias = jnp.zeros(config.vocab_size, jnp.float32)

    def __call__(
        self, hidden: Float[Array, "*batch hidden"], table: Float[Array, "vocab hidden"]
    ) -> Float[Array, "*batch vocab"]:
        """Scores in fp32 or better."""
        scores = decoded(self.norm(gelu(self.dense(hidden))), table)
        return scores + jnp.broadcast_to(self.bias.astype(scores.dtype), scores.shape)


@jax.custom_vjp
def decoded(x: Float[Array, "*batch hidden"], table: Float[Array, "vocab hidden"]) -> Float[Array, "*batch vocab"]:
    """x E^T, accumulated and returned in fp32 or better.

    The gradient is cast to the factors' dtype before its own products: left in fp32, it would draw those out of bf16.
    """
    return jnp.einsum("...h,vh->...v", x, table, preferred_element_type=wide(x.dtype))


def _forward(x: Array, table: Array) -> tuple[Array, tuple[Array, Array]]:
    return decoded(x, table), (x, table)


def _backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, table = saved
    grad, sums = grad.astype(x.dtype), wide(x.dtype)
    dx = jnp.einsum("...v,vh->...h", grad, table, preferred_element_type=sums)
    dtable = jnp.einsum("...v,...h->vh", grad, x, preferred_element_type=sums)
    return dx.astype(x.dtype), dtable.astype(table.dtype)


decoded.defvjp(_forward, _backward)


Tokens = Int[Array, "b t"]


class Embeddings(eqx.Module):
    """Token, position and token type, as far as the family has them, added and normed."""

    tokens: Embedding
    positions: Embedding | None
    types: Embedding | None
    norm: LayerNorm
    dropout: Dropout
    first: int = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        """Random tables."""
        self.first = config.first_position
        size, std = config.hidden_size, config.initializer_std
        tokens, positions, types = jax.random.split(key, 3)
        rows = self.first + config.max_length
        self.tokens = Embedding(config.vocab_size, size, std=std, key=tokens)
        self.positions = None if config.modern else Embedding(rows, size, std=std, key=positions)
        self.types = Embedding(config.types, size, std=std, key=types) if config.types else None
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps, bias=not config.modern)
        self.dropout = Dropout(config.hidden_dropout)

    def __call__(self, tokens: Tokens, types: Tokens | None, segments: Segments, key: Key) -> Hidden:
        """The first layer's input; positions count from 0 in each segment."""
        x = self.tokens(tokens)
        if self.positions is not None:
            if segments is None:
                x = x + self.positions.weight[None, self.first : self.first + tokens.shape[1]]
            else:
                x = x + self.positions(self.first + places(segments))
        if self.types is not None:
            x = x + (self.types.weight[0][None, None] if types is None else self.types(types))
        return self.dropout(self.norm(x), key)


def places(segments: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Each token's place in its run of equal segment numbers."""
    place = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return place - jax.lax.cummax(jnp.where(segments != before, place, jnp.zeros_like(place)), axis=1)


class SelfAttention(eqx.Module):
    """Multi-head attention with its output projection."""

    query: Dense
    key: Dense
    value: Dense
    output: Dense
    dropout: Dropout
    heads: int = eqx.field(static=True)
    implementation: str = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        """Random projections."""
        size = config.hidden_size
        self.query, self.key, self.value, self.output = (
            Dense(size, size, std=config.initializer_std, key=k) for k in jax.random.split(key, 4)
        )
        self.dropout = Dropout(config.attention_dropout)
        self.heads, self.implementation = config.heads, config.attention

    def __call__(self, x: Hidden, lengths: Lengths, segments: Segments, key: Key) -> Hidden:
        """Attend from each token to the tokens of its own text."""
        split = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (project(x).reshape(split) for project in (self.query, self.key, self.value))
        given = {"dropout": self.dropout, "dropout_key": key, "lengths": lengths, "segments": segments}
        return self.output(mixed(q, k, v, attention=self.implementation, **given).reshape(x.shape))


class Layer(eqx.Module):
    """Attention and a feed-forward network, each added to its input and normed after."""

    attention: SelfAttention
    attention_norm: LayerNorm
    intermediate: Dense
    output: Dense
    output_norm: LayerNorm
    dropout: Dropout

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        """Random weights."""
        attention, inner, outer = jax.random.split(key, 3)
        size, std = config.hidden_size, config.initializer_std
        self.attention = SelfAttention(config, key=attention)
        self.attention_norm = LayerNorm(size, eps=config.norm_eps)
        self.intermediate = Dense(size, config.intermediate_size, std=std, key=inner)
        self.output = Dense(config.intermediate_size, size, std=std, key=outer)
        self.output_norm = LayerNorm(size, eps=config.norm_eps)
        self.dropout = Dropout(config.hidden_dropout)

    def __call__(self, x: Hidden, lengths: Lengths, segments: Segments, key: Key) -> Hidden:
        """The next layer's input."""
        weights, first, second = keys_of(key, 3)
        x = self.attention_norm(x + self.dropout(self.attention(x, lengths, segments, weights), first))
        return self.output_norm(x + self.dropout(self.output(gelu(self.intermediate(x))), second))


class Bert(eqx.Module):
    """The encoder, with the masked language model's head and the pooler if the configuration has them.

    Attributes:
        heads: heads of the fine-tune that the encoder was loaded from; see `load`.

    """

    embeddings: Embeddings
    layers: tuple[Layer | ModernLayer, ...]
    norm: LayerNorm | None
    head: Head | None
    pooler: Dense | None
    config: BertConfig = eqx.field(static=True)
    heads: Heads | None = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray, heads: Heads | None = None):
        """A model with BERT's initial weights: normal of 0.02 cut at two deviations, biases 0, norms 1."""
        self.heads = heads
        first, head, pooler, *layers = jax.random.split(key, config.layers + 3)
        self.embeddings = Embeddings(config, key=first)
        self.layers = tuple(
            ModernLayer(config, i, key=k) if config.modern else Layer(config, key=k) for i, k in enumerate(layers)
        )
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False) if config.modern else None
        self.head = Head(config, key=head) if config.head else None
        size = config.hidden_size
        self.pooler = Dense(size, size, std=config.initializer_std, key=pooler) if config.pooler else None
        self.config = config

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        *,
        types: Int[Array, "b t"] | None = None,
        lengths: Int[Array, " b"] | None = None,
        segments: Int[Array, "b t"] | None = None,
        key: Key = None,
    ) -> Float[Array, "b t hidden"]:
        """Hidden states of the last layer.

        Args:
            tokens: rows of token numbers.
            types: type of each token; all 0 by default.
            lengths: number of tokens of each row before its padding; all by default.
            segments: a number for each token of rows that hold several texts, or padding anywhere: tokens look only at
                tokens of their own number, and positions start anew with each.
            key: random key of dropout; without it nothing is dropped.

        Raises:
            ConfigError: for rows that are longer than the model's, or an attention that cannot run here.

        """
        if tokens.shape[1] > self.config.max_length:
            raise ConfigError(f"rows of {tokens.shape[1]} tokens: the model takes at most {self.config.max_length}")
        first, *keys = keys_of(key, len(self.layers) + 1)
        x = self.embeddings(tokens, types, segments, first)
        for layer, k in zip(self.layers, keys, strict=True):
            x = layer(x, lengths, segments, k)
        return x if self.norm is None else self.norm(x)

    def logits(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Scores of every token of the vocabulary, in fp32 or better, from hidden states.

        Raises:
            ConfigError: if the model has no head.

        """
        if self.head is None:
            raise ConfigError("this model has no head for masked tokens: its weights are those of an encoder only")
        return self.head(hidden, self.embeddings.tokens.weight)

    def pooled(self, hidden: Float[Array, "b t hidden"]) -> Float[Array, "b hidden"]:
        """The first token's state through the pooler: tanh(W h + b).

        Raises:
            ConfigError: if the model has none.

        """
        if self.pooler is None:
            raise ConfigError("this model has no pooler: build or load it with pooler=True")
        return jnp.tanh(self.pooler(hidden[:, 0]))

    def with_heads(self, heads: Heads | None) -> "Bert":
        """Return these arrays with other heads of a fine-tune, which `save_model` writes beside them."""
        shapes = eqx.filter_eval_shape(Bert, self.config, key=jax.random.key(0), heads=heads)
        return jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(self))
