"""Sampling in plain JAX; parts that no row needs are not computed."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from fullstride.llm.kernels.interface import Sampled, Sampler, needs_full_sampler, truncates

# Added once to the count of a token that the prompt has; no output is as long.
PROMPT = 1 << 24

# Tokens of a block, which is drawn before one of them: most vocabularies are multiples of it, which spares the padding.
BLOCK = 256


def sample(logits: Float[Array, "D V"], sampler: Sampler, top: int) -> Sampled:
    """See `Sample`: penalties, bias, masks; then temperature, top-k, top-p, min-p, and a draw.

    Of equally probable tokens at the edge of a top-k or top-p set all are kept, so that no order of ids matters.
    """
    # One condition in the most frequent case, since a GPU's host reads each of them.
    return lax.cond(
        jnp.any(needs_full_sampler(sampler)),
        lambda: _sample_asked(logits, sampler, top),
        lambda: unscored(drawn(logits, sampler), top),
    )


def drawn(logits: Float[Array, "D V"], s: Sampler) -> Int[Array, " D"]:
    """Tokens by temperature alone, which is 0 for the most probable one.

    Two races (see `race`), one of blocks of tokens by the sums of their weights and one in the block that won: together
    a draw by the tokens' weights, since a block's share times that in the block is the token's. A row takes a random
    number for each block and for each token of one block, and its logits are read twice.
    """
    hot, heat = (s.temperature > 0)[:, None], _heat(s)
    padded = jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % BLOCK)), constant_values=-jnp.inf)
    blocks: Float[Array, "D N block"] = padded.reshape(logits.shape[0], -1, BLOCK)
    # Without the barrier XLA would take the row's maximum from all logits, and read them once more.
    largest = lax.optimization_barrier(blocks.max(-1))
    # Differences are divided, since a quotient might overflow.
    mass = jnp.exp((blocks - largest.max(-1)[:, None, None]) / heat[:, None]).sum(-1)
    words = random_words(s.key, s.position, mass.shape[1] + BLOCK)
    block = jnp.argmax(jnp.where(hot, race(mass, words[:, BLOCK:]), largest), -1, keepdims=True)
    # Not taken from the padded blocks, which would have to be in memory for it.
    places = block * BLOCK + jnp.arange(BLOCK)[None]
    own = jnp.take_along_axis(logits, places, -1, mode="fill", fill_value=-jnp.inf)
    # Relative to the block's own largest: there is a weight of 1, however small the block's share.
    weights = jnp.exp((own - jnp.take_along_axis(largest, block, -1)) / heat)
    inside = jnp.argmax(jnp.where(hot, race(weights, words[:, :BLOCK]), own), -1, keepdims=True)
    return (block * BLOCK + inside)[:, 0].astype(jnp.int32)


def _sample_asked(logits: Float[Array, "D V"], s: Sampler, top: int) -> Sampled:
    scores = lax.cond(jnp.any(s.special), lambda: adjusted(logits, s), lambda: logits)
    cut = truncates(s) & (s.temperature > 0)

    def left() -> Float[Array, "D V"]:
        """Scores with the tokens masked that the filters exclude at each row's temperature."""
        passed = filtered((scores - scores.max(-1, keepdims=True)) / _heat(s), s) > -jnp.inf
        return jnp.where(cut[:, None] & ~passed, -jnp.inf, scores)

    kept = lax.cond(jnp.any(cut), left, lambda: scores)
    token = drawn(kept, s)
    return lax.cond(jnp.any(s.wanted), lambda: score(logits, token, top), lambda: unscored(token, top))


def _heat(s: Sampler) -> Float[Array, "D 1"]:
    """Return the divisor of logit differences; it has no effect on rows without a temperature."""
    return jnp.where(s.temperature > 0, s.temperature, 1)[:, None]


def adjusted(logits: Float[Array, "D V"], s: Sampler) -> Float[Array, "D V"]:
    """Penalties (arXiv:1909.05858 and OpenAI's), biases, the mask of a grammar, no end before min_tokens."""
    counts = s.counts[s.slots]
    said, seen = counts % PROMPT, counts > 0
    repetition = s.repetition[:, None]
    punished = jnp.where(logits > 0, logits / repetition, logits * repetition)
    out = jnp.where(seen, punished, logits)
    out = out - s.presence[:, None] * (said > 0) - s.frequency[:, None] * said
    rows = jnp.arange(logits.shape[0])[:, None]
    # An id of -1 would count from the end: beyond the vocabulary it is dropped.
    known = lambda ids: (rows, jnp.where(ids < 0, logits.shape[1], ids))  # noqa: E731
    out = out.at[known(s.bias_ids[s.slots])].add(s.bias[s.slots], mode="drop")
    out = jnp.where(s.masked[:, None] & ~allowed(s.masks[s.slots], logits.shape[1]), -jnp.inf, out)
    early = (s.position < s.min_until)[:, None] & (s.stops >= 0)
    going = out.at[known(jnp.where(early, s.stops, -1))].set(-jnp.inf, mode="drop")
    # A shape that is complete leaves nothing but the end, however early.
    out = jnp.where(jnp.any(going > -jnp.inf, axis=-1, keepdims=True), going, out)
    return jnp.where(s.special[:, None], out, logits)


def allowed(words: UInt32[Array, "D words"], size: int) -> Bool[Array, "D V"]:
    """The first `size` bits of the words, low ones first."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :size] > 0


def filtered(logits: Float[Array, "D V"], s: Sampler) -> Float[Array, "D V"]:
    """Minus infinity for what top-k, then top-p (arXiv:1904.09751), then min-p (arXiv:2407.01082) leaves out."""
    size = logits.shape[1]
    wanted = jnp.where(s.top_k > 0, jnp.minimum(s.top_k, size), size)
    kept = jnp.where(logits >= threshold(logits, jnp.ones_like(logits), wanted), logits, -jnp.inf)
    shares = jax.nn.softmax(kept, axis=-1)
    # All of it may sum to less than 1, but the search may not end without a threshold.
    kept = jnp.where((logits >= threshold(logits, shares, s.top_p)) | (s.top_p >= 1)[:, None], kept, -jnp.inf)
    largest = logits.max(-1, keepdims=True)
    return jnp.where(logits >= largest + jnp.log(s.min_p)[:, None], kept, -jnp.inf)


def threshold(
    values: Float[Array, "D V"], weights: Float[Array, "D V"], wanted: Float[Array, " D"] | Int[Array, " D"]
) -> Float[Array, "D 1"]:
    """The largest t of each row such that the weights of its values >= t sum to `wanted` or more.

    Found bit by bit, from the highest, in the integers that order as floats do: 32 sums instead of a sort.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    keys = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def step(i, found):
        trial = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        mass = jnp.where(keys >= trial[:, None], weights, 0).sum(-1)
        return jnp.where(mass >= wanted, trial, found)

    found = lax.fori_loop(0, 32, step, jnp.zeros(values.shape[0], jnp.uint32))
    bits = jnp.where(found >> 31 == 1, found & jnp.uint32((1 << 31) - 1), ~found)
    # Nothing was found: the lowest key is no number, and minus infinity keeps everything.
    return jnp.where(found == 0, -jnp.inf, lax.bitcast_convert_type(bits, jnp.float32))[:, None]


def race(weights: Float[Array, "D n"], words: UInt32[Array, "D n"]) -> Float[Array, "D n"]:
    """Numbers whose largest one is at i with a probability of weights[i] over their sum, and never at a weight of zero.

    Weights over exponentially distributed times, the inverses of when each would arrive (the Gumbel maximum without its
    logarithms; arXiv:1411.0030). Nothing is summed up, so that rare ones keep their share, too: times are
    as fine as 2^-32 near zero.

    Args:
        weights: zero or normal numbers, at least one of them 1 or more.
        words: independent random bits.

    """
    # Words near 2^32 round to it, and a share of 1 would arrive never.
    share = jnp.minimum((words.astype(jnp.float32) + 0.5) * 2**-32, 1 - 2**-24)
    return weights / -jnp.log1p(-share)


def random_words(key: UInt32[Array, "D 2"], position: Int[Array, " D"], size: int) -> UInt32[Array, "D {size}"]:
    """Random bits of each row, from its own key and its token's position alone: other rows change nothing."""

    def row(words, place):
        own = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), place)
        return jax.random.bits(own, (size,))

    return jax.vmap(row)(key, position)


def score(logits: Float[Array, "D V"], tokens: Int[Array, " D"], top: int) -> Sampled:
    """Logprob and rank (1 is the most probable) of given tokens, and the `top` most probable ones."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    best, ids = lax.top_k(logprobs, min(top, logits.shape[1]))
    missing = top - best.shape[1]
    best = jnp.pad(best, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    ids = jnp.pad(ids, ((0, 0), (0, missing)), constant_values=-1)
    rank = 1 + (logprobs > own).sum(-1, dtype=jnp.int32)
    return Sampled(tokens, own[:, 0], rank, ids.astype(jnp.int32), best)


def unscored(tokens: Int[Array, "*rows"], top: int) -> Sampled:
    """Wrap tokens without logprobs."""
    one, many = tokens.shape, (*tokens.shape, top)
    zeros, none = jnp.zeros(one, jnp.float32), jnp.zeros(one, jnp.int32)
    return Sampled(tokens, zeros, none, jnp.zeros(many, jnp.int32), jnp.zeros(many, jnp.float32))
