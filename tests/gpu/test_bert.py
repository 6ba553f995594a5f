"""BERT on a GPU: cuDNN's attention, and steps in bf16. Run by hand: `python -m pytest tests/gpu/test_bert.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.bert.data.batch import synthetic_batch
from fullstride.bert.model.attention import attend, attend_eagerly
from fullstride.bert.model.bert import Bert
from fullstride.bert.model.config import BertConfig
from fullstride.bert.model.layers import Dropout
from fullstride.bert.training.build import attention_of
from fullstride.bert.training.loss import mlm_loss
from fullstride.step.jax import TrainStep

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU that JAX sees")


def _eager(q, k, v, **masks):
    return attend_eagerly(q, k, v, dropout=Dropout(0.0), dropout_key=None, **masks)


def _cudnn(q, k, v, **masks):
    return attend(q, k, v, implementation="cudnn", **masks)


def _xla(q, k, v, **masks):
    return attend(q, k, v, implementation="xla", **masks)


def _value_and_gradients(function, qkv, cotangent, **masks):
    out, vjp = jax.vjp(lambda *qkv: function(*qkv, **masks), *qkv)
    return [np.asarray(x, np.float64) for x in (out, *vjp(cotangent.astype(out.dtype)))]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("masks", [(), ("lengths",), ("segments",)], ids="+".join)
@pytest.mark.parametrize("shape", [(3, 128, 2, 64), (2, 74, 3, 40), (1, 512, 12, 64)], ids=str)
def test_cudnn_is_as_near_to_fp32_as_xla_is(shape, masks, dtype):
    rng = np.random.default_rng(sum(shape))
    q, k, v, cotangent = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(4))
    lengths = rng.integers(1, shape[1] + 1, shape[0])
    known = {
        "lengths": jnp.asarray(lengths, jnp.int32),
        "segments": jnp.asarray(np.sort(rng.integers(1, 4, shape[:2]), axis=1), jnp.int32),
    }
    given = {name: known[name] for name in masks}
    # What padding attends to is arbitrary.
    real = (np.arange(shape[1])[None] < lengths[:, None])[:, :, None, None] | ("lengths" not in masks)
    cotangent = jnp.where(real, cotangent, 0)
    rounded = [x.astype(dtype) for x in (q, k, v)]
    exact = _value_and_gradients(_eager, [x.astype(jnp.float32) for x in rounded], cotangent, **given)
    ours = _value_and_gradients(_cudnn, rounded, cotangent, **given)
    theirs = _value_and_gradients(_xla, rounded, cotangent, **given)
    for place, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
        if place == 0:
            a, b, c = (np.where(real, x, 0) for x in (a, b, c))
        floor = float(jnp.finfo(dtype).eps) * np.abs(c).max()
        assert np.abs(a - c).max() <= 4 * max(np.abs(b - c).max(), floor)


@pytest.mark.parametrize("masks", [(), ("segments",)], ids="+".join)
@pytest.mark.parametrize("length", [64, 192])
def test_cudnns_gradients_are_there_where_all_scores_are_low(length, masks):
    """Its backward pass reads 128 keys at a time: exp(0 - lse) past the last key would be infinite."""
    rng = np.random.default_rng(length)
    q, k, v, cotangent = (jnp.asarray(rng.normal(size=(2, length, 2, 64)), jnp.bfloat16) for _ in range(4))
    q, k = q.at[..., 0].set(4.0), k.at[..., 0].set(-150 * 8 / 4.0)
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (2, length)), axis=1), jnp.int32)
    given = {"segments": segments} if masks else {}
    exact = _value_and_gradients(_eager, [x.astype(jnp.float32) for x in (q, k, v)], cotangent, **given)
    for a, c in zip(_value_and_gradients(_cudnn, (q, k, v), cotangent, **given), exact, strict=True):
        # In the added column a query's gradient is what is left of terms that are 300 times those of the others.
        assert np.isfinite(a).all()
        assert np.linalg.norm((a - c)[..., 1:]) <= 0.02 * np.linalg.norm(c[..., 1:])


@pytest.mark.parametrize("layout", ["flat", "grouped"])
@pytest.mark.parametrize("masks", ["full", "packed"])
def test_a_bf16_step_by_cudnn_learns_as_one_in_fp32(layout, masks):
    config = BertConfig.named("mini", vocab_size=1000, max_length=128, hidden_dropout=0.0)
    assert attention_of(config, "bf16") == "cudnn"
    batch = synthetic_batch(config, 8, 128, jax.random.key(1))
    if masks == "packed":
        segments = np.repeat(np.arange(1, 5), 32)[None].repeat(8, 0)
        batch = batch._replace(segments=jnp.asarray(segments, jnp.int32))
    losses = {}
    for precision, attention in {"fp32": "xla", "bf16": "cudnn"}.items():
        model = Bert(dataclasses.replace(config, attention=attention), key=jax.random.key(0))
        step = TrainStep(mlm_loss, optax.adamw(1e-3), model, precision=precision, layout=layout, on_retrace="raise")
        state, found = step.init(), []
        for _ in range(30):
            state, late = step(state, batch, None)
            found += [float(late["loss"])] if late else []
        losses[precision] = np.array([*found, float(step.finish()["loss"])])
    assert losses["fp32"][-1] < 0.7 * losses["fp32"][0]
    np.testing.assert_allclose(losses["bf16"], losses["fp32"], rtol=0.03)


def test_dropped_attention_weights_take_the_eager_path_and_train():
    config = BertConfig.named("tiny", vocab_size=1000, max_length=64, attention_dropout=0.1)
    assert attention_of(config, "bf16") == "eager"
    batch = synthetic_batch(config, 8, 64, jax.random.key(1))
    step = TrainStep(mlm_loss, optax.adamw(1e-3), Bert(config, key=jax.random.key(0)), precision="bf16")
    state = step.init()
    for i in range(20):
        state, _ = step(state, batch, jax.random.key(i))
    assert step.finish()["loss"] < 6.9
