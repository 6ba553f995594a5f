from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fullstride.bert.model.attention import attend, attend_eagerly, chosen
from fullstride.bert.model.layers import Dropout
from fullstride.errors import ConfigError


def inputs(seed: int, shape=(2, 11, 3, 5)):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, shape[1] + 1, shape[0])
    segments = np.sort(rng.integers(1, 4, shape[:2]), axis=1)
    return [rng.normal(size=shape) for _ in range(3)], lengths, segments


def closed_form(q, k, v, allowed):
    """Softmax attention in fp64."""
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    weights = np.where(allowed[:, None], np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def eager(q, k, v, rate=0.0, key=None, **masks):
    return attend_eagerly(q, k, v, dropout=Dropout(rate), dropout_key=key, **masks)


def fused(q, k, v, **masks):
    return attend(q, k, v, implementation="xla", **masks)


@pytest.mark.parametrize("attention", [eager, fused])
@pytest.mark.parametrize("masks", [(), ("lengths",), ("segments",), ("segments", "window")], ids="+".join)
def test_it_is_the_closed_form(attention, masks, seed):
    qkv, lengths, segments = inputs(seed)
    allowed = np.ones((2, 11, 11), bool)
    if "lengths" in masks:
        allowed &= np.arange(11) < lengths[:, None, None]
    if "segments" in masks:
        allowed &= segments[:, :, None] == segments[:, None]
    known: dict[str, Any] = {"lengths": jnp.asarray(lengths, jnp.int32), "segments": jnp.asarray(segments, jnp.int32)}
    if "window" in masks:
        known["window"] = 2
        allowed &= np.abs(np.arange(11)[:, None] - np.arange(11)) <= 2
    given: dict[str, Any] = {name: known[name] for name in masks}
    expected = closed_form(qkv[0], qkv[1], qkv[2], allowed)
    q, k, v = [jnp.asarray(x, jnp.float32) for x in qkv]
    real = np.broadcast_to((np.arange(11) < lengths[:, None]) | ("lengths" not in masks), (2, 11))
    np.testing.assert_allclose(np.asarray(attention(q, k, v, **given))[real], expected[real], atol=1e-6)
    # The gradient, where only what may be looked at counts.
    cotangent = jnp.asarray(np.where(real[..., None, None], expected, 0), jnp.float32)
    ours, theirs = (jax.grad(lambda v, f=f: jnp.sum(f(q, k, v, **given) * cotangent))(v) for f in (attention, eager))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("segmented", [False, True])
def test_cudnn_is_told_of_padding_where_its_last_tile_is_not_full(segmented, monkeypatch):
    asked = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **kwargs: asked.append(kwargs) or q)
    for length in (128, 64, 192, 384, 74):
        qkv, lengths, segments = inputs(length, (2, length, 1, 4))
        q, k, v = (jnp.asarray(x, jnp.float32) for x in qkv)
        masks: dict[str, Any] = {"segments": jnp.asarray(segments)} if segmented else {}
        for implementation in ("cudnn", "xla"):
            attend(q, k, v, implementation=implementation, **masks)
            given = asked.pop()
            full = implementation == "cudnn" and length % 128 > 0
            found = given["key_value_seq_lengths"]
            assert found is None if not full else (found.tolist() == [length] * 2 and found.dtype == jnp.int32)
            assert (given["mask"] is not None) == segmented
            attend(q, k, v, implementation=implementation, lengths=jnp.asarray(lengths), **masks)
            assert asked.pop()["key_value_seq_lengths"].tolist() == lengths.tolist()


def test_dropped_weights_average_out():
    (q, k, v), *_ = inputs(0)
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    keys = jax.random.split(jax.random.key(0), 4000)
    dropped = jax.lax.map(lambda key: eager(q, k, v, 0.25, key), keys)
    spread = np.asarray(dropped).std(0) / np.sqrt(len(keys))
    assert (spread > 0).all()
    assert (np.abs(np.asarray(dropped).mean(0) - eager(q, k, v)) < 6 * spread + 1e-6).all()


@pytest.mark.parametrize(
    ("attention", "drops", "dtype", "size", "backend", "expected"),
    [
        ("auto", False, "bfloat16", 64, "gpu", "cudnn"),
        ("auto", False, "float16", 128, "gpu", "cudnn"),
        ("auto", False, "float32", 64, "gpu", "xla"),
        ("auto", False, "bfloat16", 36, "gpu", "xla"),
        ("auto", False, "bfloat16", 64, "cpu", "xla"),
        ("auto", True, "bfloat16", 64, "gpu", "eager"),
        ("auto", False, "float64", 64, "gpu", "eager"),
        ("auto", False, "float64", 64, "cpu", "eager"),
        ("auto", False, "float16", 64, "cpu", "eager"),
        ("auto", False, "float16", 36, "gpu", "xla"),
        ("xla", False, "bfloat16", 64, "gpu", "xla"),
        ("eager", False, "bfloat16", 64, "gpu", "eager"),
        ("cudnn", False, "bfloat16", 64, "gpu", "cudnn"),
    ],
)
def test_auto_takes_what_runs_and_a_named_one_is_taken(attention, drops, dtype, size, backend, expected):
    assert chosen(attention, drops, dtype, size, 0, backend) == expected
    assert chosen(attention, drops, dtype, size, 64, backend) == expected


def test_rows_of_several_texts_and_odd_length_are_not_for_cudnn():
    assert chosen("auto", False, "bfloat16", 64, 63, "gpu") == "xla"
    with pytest.raises(ConfigError, match="packed rows have 63 tokens, expected an even number"):
        chosen("cudnn", False, "bfloat16", 64, 63, "gpu")


@pytest.mark.parametrize(
    ("dtype", "size", "backend", "reason"),
    [
        ("bfloat16", 64, "cpu", "JAX runs on cpu"),
        ("float32", 64, "gpu", "the queries are float32"),
        ("bfloat16", 36, "gpu", "head_size is 36"),
        ("bfloat16", 136, "gpu", "head_size is 136"),
    ],
)
def test_cudnn_runs_or_says_why_not(dtype, size, backend, reason):
    with pytest.raises(ConfigError, match=f"attention=cudnn: .*{reason}"):
        chosen("cudnn", False, dtype, size, 0, backend)


def test_xlas_softmax_is_not_that_of_fp64():
    (q, k, v), *_ = inputs(0)
    expected = closed_form(q, k, v, np.ones((2, 11, 11), bool))
    # JAX's own mixes dtypes.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        q, k, v = (jnp.asarray(x) for x in (q, k, v))
        errors = [np.abs(np.asarray(attention(q, k, v)) - expected).max() for attention in (eager, fused)]
    assert errors[0] < 1e-14 < 1e-9 < errors[1]
    with pytest.raises(ConfigError, match="attention=xla: its softmax is fp32, but the queries are float64"):
        chosen("xla", False, "float64", 64)


def test_xla_has_no_product_of_fp16_on_a_cpu():
    (q, k, v), *_ = inputs(0)
    expected = closed_form(q, k, v, np.ones((2, 11, 11), bool))
    q, k, v = (jnp.asarray(x, jnp.float16) for x in (q, k, v))
    np.testing.assert_allclose(eager(q, k, v), expected, atol=5e-3)
    with pytest.raises(
        ConfigError, match="attention=xla: XLA has no fp16 matrix product for attention on a CPU; use attention=eager"
    ):
        chosen("xla", False, "float16", 64)
