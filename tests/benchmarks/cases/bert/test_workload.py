from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases.bert.workload import config_of, workload
from benchmarks.cases.step_jax.options import MODES
from benchmarks.experiments.bert import steps as experiment_steps
from fullstride.bert.data.batch import synthetic_batch
from fullstride.bert.data.rows import Vocabulary
from fullstride.bert.model.config import BertConfig
from fullstride.bert.training.settings import settings_of


@pytest.fixture(autouse=True)
def _as_users_do():
    """Allow implicit dtype promotion, because JAX's own attention promotes bf16."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("mode", MODES)
def test_operations_are_those_that_xla_counts(mode):
    work = workload("tiny", mode, "fp32", batch=3, length=40)
    jitted: Any = eqx.filter_jit(eqx.filter_grad(work.loss_fn))
    step = jitted.lower(work.model(), work.batch, work.key)
    # XLA counts what is not a product, too.
    assert 0.85 < work.flops / step.lowered.cost_analysis()["flops"] < 1.0


def test_a_larger_share_to_predict_is_more_operations_of_the_head(monkeypatch):
    settings = settings_of(["data.mask_fraction=0.5", "data.batch_size=3", "data.length=40", "data.vocab_size=3000"])
    plain = synthetic_batch(BertConfig.named("tiny", vocab_size=3000), 3, 40, jax.random.key(0))
    masked, labels, counted = (jnp.tile(x, 4)[:, :20] for x in (plain.masked, plain.labels, plain.counted))
    vocabulary = Vocabulary(3000, 0, 1, 2, 3, np.arange(4, 3000, dtype=np.int32), np.zeros(3000, bool))
    rows = SimpleNamespace(train=SimpleNamespace(vocabulary=vocabulary))
    batches = SimpleNamespace(at=lambda _: plain._replace(masked=masked, labels=labels, counted=counted))
    monkeypatch.setattr(experiment_steps, "data_for", lambda _: (rows, batches))
    work = experiment_steps._workload("tiny", settings)
    jitted: Any = eqx.filter_jit(eqx.filter_grad(work.loss_fn))
    counted_by_xla = jitted.lower(work.model(), work.batch, work.key).lowered.cost_analysis()["flops"]
    assert 0.85 < work.flops / counted_by_xla < 1.0


def test_modes_drop_what_they_say():
    plain, written, hidden, dropped = (config_of("base", mode) for mode in MODES)
    assert (plain.hidden_dropout, plain.attention_dropout, plain.attention) == (0.0, 0.0, "auto")
    assert (written.hidden_dropout, written.attention_dropout, written.attention) == (0.0, 0.0, "eager")
    assert (hidden.hidden_dropout, hidden.attention_dropout, hidden.attention) == (0.1, 0.0, "auto")
    assert (dropped.hidden_dropout, dropped.attention_dropout, dropped.attention) == (0.1, 0.1, "eager")
    assert plain.layers == 12


@pytest.mark.usefixtures("tiny_is_small")
def test_attention_written_out_trains_as_fused_attention():
    fused, written = (workload("tiny", mode, "fp32", batch=2, length=24) for mode in ("sdpa", "eager"))
    (loss, grads), (other, others) = (
        eqx.filter_jit(eqx.filter_value_and_grad(work.loss_fn))(work.model(), work.batch, work.key)
        for work in (fused, written)
    )
    assert loss == pytest.approx(float(other), rel=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1e-3, float(jnp.abs(a).max())))


@pytest.mark.usefixtures("tiny_is_small")
def test_only_what_drops_depends_on_the_key():
    for mode, differs in (("sdpa", False), ("eager", False), ("hidden", True), ("dropout", True)):
        work = workload("tiny", mode, "bf16", batch=2, length=16)
        loss = eqx.filter_jit(work.loss_fn)
        first, second = (loss(work.model(), work.batch, jax.random.key(i)) for i in range(2))
        assert bool(first != second) is differs
        assert first.dtype == "float32"
