import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fullstride.bert.model.bert import Bert, places
from fullstride.bert.model.config import SIZES, BertConfig
from fullstride.errors import ConfigError
from tests.bert.models import ODD, awake, ids, run


def count(config: BertConfig) -> int:
    shapes = eqx.filter_eval_shape(Bert, config, key=jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes) if not isinstance(x, bool))


# Of the encoder with its pooler; 110M and 340M in the paper's words. base6 is DistilBERT's 66,362,880, which has no
# pooler (590,592) and no token types (1,536), with both.
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("tiny", 4_385_920),
        ("mini", 11_170_560),
        ("base6", 66_955_008),
        ("base", 109_482_240),
        ("large", 335_141_888),
    ],
)
def test_sizes_have_the_published_number_of_weights(name, weights):
    assert count(BertConfig.named(name, head=False, pooler=True)) == weights


def test_initial_weights_are_berts():
    model = Bert(BertConfig.named("tiny", vocab_size=500), key=jax.random.key(0))
    matrices = [x for x in jax.tree.leaves(model) if not isinstance(x, bool) and x.ndim == 2]
    values = np.concatenate([np.ravel(x) for x in matrices]) / 0.02
    # A normal distribution cut off at 2 has this deviation.
    cut = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))
    assert abs(values).max() <= 2
    assert values.std() == pytest.approx(cut, abs=0.01)
    assert values.mean() == pytest.approx(0, abs=0.01)
    vectors = [x for x in jax.tree.leaves(model) if not isinstance(x, bool) and x.ndim == 1]
    assert {float(v) for x in vectors for v in np.unique(x)} == {0.0, 1.0}


def test_packed_texts_are_as_if_each_had_a_row_of_its_own(seed):
    model = awake(ODD, seed)
    texts = [np.asarray(ids(seed + i, (1, n))) for i, n in enumerate((9, 4, 13))]
    row = jnp.concatenate([*texts, jnp.zeros((1, 5), jnp.int32)], axis=1)
    segments = jnp.asarray([[1] * 9 + [2] * 4 + [3] * 13 + [0] * 5], jnp.int32)
    packed = run(model, row, segments=segments)
    alone = jnp.concatenate([run(model, jnp.asarray(text)) for text in texts], axis=1)
    np.testing.assert_allclose(packed[:, :26], alone, atol=1e-5)
    assert not np.allclose(packed[:, :26], run(model, row)[:, :26], atol=1e-2)


def test_places_count_from_0_in_each_segment():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 3, 0, 0], [5, 4, 4, 4, 5, 5, 1, 1]])
    np.testing.assert_array_equal(places(segments), [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 0, 1, 0, 1]])


def test_padding_changes_nothing(seed):
    model, tokens = awake(ODD, seed), ids(seed, (2, 12))
    lengths = jnp.asarray([12, 7], jnp.int32)
    other = tokens.at[1, 7:].set(3)
    by_lengths = [run(model, t, lengths=lengths) for t in (tokens, other)]
    by_segments = run(model, other, segments=(jnp.arange(12)[None] < lengths[:, None]).astype(jnp.int32))
    for hidden in (by_lengths[1], by_segments):
        np.testing.assert_allclose(hidden[1, :7], by_lengths[0][1, :7], atol=1e-5)
        np.testing.assert_allclose(hidden[0], by_lengths[0][0], atol=1e-5)


def test_dropout_is_on_with_a_key_and_off_without_or_in_inference_mode(seed):
    config = dataclasses.replace(ODD, hidden_dropout=0.3, attention_dropout=0.2)
    model, tokens, key = awake(config, seed), ids(seed, (2, 12)), jax.random.key(seed)
    plain = run(model, tokens)
    dropped = run(model, tokens, key=key)
    assert np.abs(dropped - plain).max() > 0.1
    np.testing.assert_array_equal(dropped, run(model, tokens, key=key))
    assert np.abs(dropped - run(model, tokens, key=jax.random.key(seed + 9))).max() > 0.1
    np.testing.assert_array_equal(plain, run(eqx.nn.inference_mode(model), tokens, key=key))


def test_rows_that_are_too_long_and_parts_that_are_absent_are_refused():
    model = awake(dataclasses.replace(ODD, head=False, pooler=False), 0)
    with pytest.raises(ConfigError, match="rows of 42 tokens: the model takes at most 41"):
        model(ids(0, (1, 42)))
    hidden = run(model, ids(0, (1, 5)))
    with pytest.raises(ConfigError, match="no head"):
        model.logits(hidden)
    with pytest.raises(ConfigError, match="no pooler"):
        model.pooled(hidden)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 35}, "hidden_size=35: expected a multiple of heads=3"),
        ({"layers": 0}, "layers=0"),
        ({"hidden_dropout": 1.0}, "hidden_dropout=1.0"),
        ({"attention": "flash"}, "attention=flash: expected one of"),
        ({"attention": "cudnn", "attention_dropout": 0.1}, "attention=cudnn drops no weights"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, named):
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(ODD, **change)


def test_names_are_listed_and_changes_taken():
    with pytest.raises(ConfigError, match="model=bas: expected one of base"):
        BertConfig.named("bas")
    assert BertConfig.named("base", heads=8) == BertConfig(heads=8)
    assert list(SIZES) == ["tiny", "mini", "small", "medium", "base6", "base", "large"]
