import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.bert.data.batch import predictions, synthetic_batch
from fullstride.bert.model.bert import Bert
from fullstride.bert.model.config import BertConfig
from fullstride.bert.training.loss import mlm_loss, predicted
from fullstride.step.jax import TrainStep
from tests.bert.models import ODD, awake, batch_of, loss_of, run, scores


def test_it_is_the_cross_entropy_at_the_places_that_count(seed):
    model, batch = awake(ODD, seed), batch_of(seed, ODD)
    loss, aux = loss_of(model, batch)
    logits = np.asarray(scores(model, run(model, batch.tokens)), np.float64)
    nats, right = [], []
    for r, i in zip(*np.nonzero(np.asarray(batch.counted)), strict=True):
        row, label = logits[r, batch.masked[r, i]], int(batch.labels[r, i])
        nats.append(np.log(np.exp(row - row[label]).sum()))
        right.append(row.argmax() == label)
    np.testing.assert_allclose(loss, np.mean(nats), rtol=1e-5)
    np.testing.assert_allclose(aux["accuracy"], np.mean(right), rtol=1e-6)
    assert loss > 1


def test_what_is_not_counted_has_no_part_in_loss_or_gradient(seed):
    model, batch = awake(ODD, seed), batch_of(seed, ODD)
    other = batch._replace(labels=jnp.where(batch.counted, batch.labels, (batch.labels + 5) % 97))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda model, batch: mlm_loss(model, batch)[0].value))
    for a, b in zip(*(jax.tree.leaves(gradient(model, x)) for x in (batch, other)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    nothing = batch._replace(counted=jnp.zeros_like(batch.counted))
    loss, aux = loss_of(model, nothing)
    assert (loss, aux["accuracy"]) == (0, 0)


def _whole(model, batch):
    """Cross entropy over all predictions of a batch, written out."""
    logits = model.logits(model(batch.tokens))
    nats = -jnp.take_along_axis(
        jax.nn.log_softmax(logits)[jnp.arange(6)[:, None], batch.masked], batch.labels[:, :, None], -1
    )
    return nats[..., 0].mean(where=batch.counted)


@pytest.mark.parametrize("count", [2, 6])
def test_gradients_of_rows_with_few_and_many_predictions_add_up_to_the_batchs(count):
    with jax.enable_x64(True):
        model = jax.tree.map(lambda x: x if isinstance(x, bool) else x.astype("float64"), awake(ODD, 4))
        batch = batch_of(4, ODD, rows=6)
        batch = batch._replace(counted=np.arange(4) < np.asarray([[4], [1], [0], [3], [1], [2]]))
        step = TrainStep(mlm_loss, optax.sgd(1.0), model, accumulate=count)
        state, _ = step(step.init(), batch)
        loss, gradient = eqx.filter_jit(eqx.filter_value_and_grad(_whole))(model, batch)
        assert step.finish()["loss"] == pytest.approx(float(loss), rel=1e-12)
        trees = (eqx.filter(tree, eqx.is_inexact_array) for tree in (model, state.model, gradient))
        for before, after, expected in zip(*map(jax.tree.leaves, trees), strict=True):
            np.testing.assert_allclose(before - after, expected, rtol=1e-9, atol=1e-13)


def test_the_right_token_is_right():
    model, batch = awake(ODD, 0), batch_of(0, ODD)
    logits = scores(model, jnp.take_along_axis(run(model, batch.tokens), batch.masked[:, :, None], 1))
    best = batch._replace(labels=jnp.argmax(logits, -1).astype(jnp.int32))
    np.testing.assert_array_equal(predicted(model, best)[1], batch.counted)
    assert not predicted(model, best._replace(labels=(best.labels + 1) % 97))[1].any()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_learns_a_batch_by_heart_and_is_traced_once(precision):
    config = BertConfig.named("tiny", vocab_size=60, max_length=20, hidden_dropout=0.0)
    config = dataclasses.replace(config, layers=1, hidden_size=32, intermediate_size=64)
    batch = synthetic_batch(config, 4, 20, jax.random.key(1))
    step = TrainStep(mlm_loss, optax.adamw(3e-3), Bert(config, key=jax.random.key(0)), precision=precision)
    state = step.init()
    # Bf16 through JAX's own attention mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(60):
            state, _ = step(state, batch, None)
    metrics = step.finish()
    assert metrics["accuracy"] == 1
    assert metrics["loss"] < 0.5
    assert step.traces == 1


def test_synthetic_batches_are_full_and_predict_the_share(seed):
    config = BertConfig.named("tiny", vocab_size=50)
    batch = synthetic_batch(config, 5, 40, jax.random.key(seed))
    assert batch.masked.shape == batch.labels.shape == (5, predictions(40)) == (5, 6)
    assert bool(batch.counted.all())
    assert all(len(set(row.tolist())) == 6 for row in np.asarray(batch.masked))
    assert int(batch.tokens.max()) < 50
