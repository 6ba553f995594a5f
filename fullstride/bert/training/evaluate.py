"""Held-out numbers: the masked loss, and bits per byte, which stay comparable when the tokenizer changes."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fullstride.bert.data.batch import Batch, in_turn, mask_tokens
from fullstride.bert.data.rows import TokenRows
from fullstride.bert.model.bert import Bert
from fullstride.bert.training.loss import predicted
from fullstride.step.jax import cached_filter_jit
from fullstride.step.jax.precision import precision_of

# The same masks at each evaluation, whatever a run's seed.
SEED = 0


@dataclass(frozen=True)
class Scores:
    """Scores on held-out text.

    Attributes:
        masked_loss: nats per prediction, under masks as in training, drawn once.
        masked_accuracy: share of those predictions in which no other token was likelier.
        bits_per_byte: see `Evaluator`.
        tokens: number of the texts' tokens.
        bytes: bytes of the texts in UTF-8.

    """

    masked_loss: float
    masked_accuracy: float
    bits_per_byte: float
    tokens: int
    bytes: int

    def __str__(self) -> str:
        """One line."""
        return (
            f"masked loss {self.masked_loss:.3f}, accuracy {self.masked_accuracy:.1%}, "
            f"{self.bits_per_byte:.3f} bits/byte of {self.bytes:,} held-out bytes"
        )


class Evaluator:
    """Scores a model on held-out rows.

    Bits per byte are those of the pseudo-log-likelihood (arXiv:1910.14659) of all tokens: each is predicted once, from
    the row with it and a 1 / round(1 / mask_fraction) share of the others behind [MASK], and the sum of -log2 p is
    divided by the bytes of the texts as they were before any tokenizer saw them. It is no compression rate: a token
    that the tokenizer does not know costs one prediction of [UNK], and a lower-case one's case costs nothing.
    """

    def __init__(
        self,
        rows: TokenRows,
        size: int,
        *,
        batch_size: int = 64,
        fraction: float = 0.15,
        whole_words: bool = False,
        precision: str = "fp32",
    ):
        """Keep the rows.

        Args:
            rows: rows of held-out texts.
            size: the texts' bytes in UTF-8.
            batch_size: rows of a forward pass; changes no result.
            fraction: share of the tokens that are predicted at once.
            whole_words: whether the masked loss hides words as a whole.
            precision: precision of the model, as in `fullstride.step.jax.TrainStep`.

        """
        self.rows, self.size, self.batch_size = rows, size, batch_size
        self.fraction, self.whole_words = fraction, whole_words
        cast = precision_of(precision).cast

        def sums(model: Bert, batch: Batch) -> Float[Array, " 3"]:
            nats, right = predicted(cast(model), batch)
            parts = (nats.sum(), right.sum(dtype=jnp.float32), batch.counted.sum(dtype=jnp.float32))
            return jnp.stack([part.astype(jnp.float32) for part in parts])

        self._sums = cached_filter_jit(sums)

    def __call__(self, model: Bert) -> Scores:
        """The scores of a model; nothing is dropped."""
        rng = np.random.default_rng(SEED)
        once = mask_tokens(self.rows, rng, self.fraction, whole_words=self.whole_words)
        nats, right, count = self._total(model, [once])
        total, _, tokens = self._total(model, in_turn(self.rows, rng, self.fraction))
        assert tokens == self.rows.count(), "every token is predicted once"
        bits = total / math.log(2) / self.size
        return Scores(nats / max(1, count), right / max(1, count), bits, int(tokens), self.size)

    def _total(self, model: Bert, batches: Iterable[Batch]) -> list[float]:
        # All are sent off before the first is waited for; fp64 adds them up.
        parts = [self._sums(model, part) for batch in batches for part in _parts(batch, self.batch_size)]
        return np.sum([np.asarray(part, np.float64) for part in parts], axis=0).tolist()


def _parts(batch: Batch, size: int) -> Iterator[Batch]:
    """The batch in parts of one size, the last filled up with rows that count for nothing."""
    for first in range(0, len(batch.tokens), size):
        part = jax.tree.map(itemgetter(slice(first, first + size)), batch)
        missing = size - len(part.tokens)
        yield jax.tree.map(lambda x, more=missing: np.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)]), part)
