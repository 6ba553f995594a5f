from typing import Any

import equinox as eqx
import jax
import pytest

from fullstride.bert.bench_workload import config_of, workload


@pytest.fixture(autouse=True)
def _as_users_do():
    """JAX's own attention promotes bf16."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("mode", ["sdpa", "dropout"])
def test_operations_are_those_that_xla_counts(mode):
    work = workload("tiny", mode, "fp32", batch=3, length=40)
    jitted: Any = eqx.filter_jit(eqx.filter_grad(work.loss_fn))
    step = jitted.lower(work.model(), work.batch, work.key)
    # XLA counts what is not a product, too.
    assert 0.85 < work.flops / step.lowered.cost_analysis()["flops"] < 1.0


def test_modes_are_the_references():
    plain, dropped = config_of("base", "sdpa"), config_of("base", "dropout")
    assert (plain.hidden_dropout, plain.attention_dropout, plain.attention) == (0.0, 0.0, "auto")
    assert (dropped.hidden_dropout, dropped.attention_dropout, dropped.attention) == (0.1, 0.1, "eager")
    assert plain.layers == 12


def test_only_dropout_depends_on_the_key():
    for mode, differs in (("sdpa", False), ("dropout", True)):
        work = workload("tiny", mode, "bf16", batch=2, length=16)
        loss = eqx.filter_jit(work.loss_fn)
        first, second = (loss(work.model(), work.batch, jax.random.key(i)) for i in range(2))
        assert bool(first != second) is differs
        assert first.dtype == "float32"
