import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fullstride.bert.data.batch import in_turn, mask_tokens
from fullstride.bert.data.rows import rows_of
from fullstride.bert.model.config import BertConfig
from fullstride.bert.training.evaluate import SEED, Evaluator
from tests.bert.data.texts import corpus, tokenizer
from tests.bert.models import awake, run, scores

HELD = corpus(25, 7)
ROWS = rows_of(HELD, tokenizer(), 20)
SIZES = BertConfig(90, 12, layers=1, heads=2, intermediate_size=20, max_length=20)


def bits_by_hand(model, batches) -> float:
    """-log2 p of each token, in fp64, one prediction after another."""
    total = 0.0
    for batch in batches:
        logits = np.asarray(
            scores(model, run(model, batch.tokens, segments=batch.segments, lengths=batch.lengths)), np.float64
        )
        for row, place in zip(*np.nonzero(batch.counted), strict=True):
            found = logits[row, batch.masked[row, place]]
            total += np.log2(np.exp(found - found[batch.labels[row, place]]).sum())
    return total


@pytest.mark.parametrize(("batch_size", "pack"), [(4, True), (64, True), (7, False)])
def test_bits_per_byte_are_those_of_every_token_over_the_texts_bytes(seed, batch_size, pack):
    model, rows = awake(SIZES, seed), rows_of(HELD, tokenizer(), 20, pack=pack)
    found = Evaluator(rows, HELD.size(), batch_size=batch_size)(model)
    rng = np.random.default_rng(SEED)
    once = mask_tokens(rows, rng)
    total = bits_by_hand(model, in_turn(rows, rng))
    assert found.bits_per_byte == pytest.approx(total / HELD.size(), rel=1e-5)
    assert found.bytes == sum(len(entry.encode()) for entry in HELD.entries)
    assert found.tokens == rows.count()
    expected = bits_by_hand(model, [once]) * math.log(2) / once.counted.sum()
    assert found.masked_loss == pytest.approx(expected, rel=1e-5)
    assert 0 <= found.masked_accuracy < 0.5


def test_dropout_is_off_and_scores_repeat():
    model = awake(replace(SIZES, hidden_dropout=0.5), 0)
    evaluator = Evaluator(ROWS, HELD.size(), whole_words=True)
    assert evaluator(model) == evaluator(model)


def test_a_uniform_model_pays_the_vocabularys_bits_for_each_token():
    model = jax.tree.map(lambda x: x if isinstance(x, bool) else jnp.zeros_like(x), awake(SIZES, 0))
    found = Evaluator(ROWS, HELD.size())(model)
    assert found.bits_per_byte == pytest.approx(math.log2(90) * ROWS.count() / HELD.size(), rel=1e-5)
    assert found.masked_loss == pytest.approx(math.log(90), rel=1e-5)
