"""BERT's training step as `python -m benchmarks train-step` measures it."""

from typing import Any

import jax
import optax

from benchmarks.cases.step_jax.workload import Workload
from fullstride.bert.data.batch import MASKED, predictions, synthetic_batch
from fullstride.bert.model.bert import Bert
from fullstride.bert.model.config import BertConfig
from fullstride.bert.training.loss import mlm_loss
from fullstride.step.jax.precision import precision_of

DROPOUT = 0.1
# What is dropped of hidden states and of attention's weights, and how attention runs: fused it drops none of them.
MODES = {
    "sdpa": (0.0, 0.0, "auto"),
    "eager": (0.0, 0.0, "eager"),
    "hidden": (DROPOUT, 0.0, "auto"),
    "dropout": (DROPOUT, DROPOUT, "eager"),
}


def config_of(model: str, mode: str) -> BertConfig:
    """Return the configuration of a size of BERT in one of `MODES`."""
    hidden, weights, attention = MODES[mode]
    return BertConfig.named(model, hidden_dropout=hidden, attention_dropout=weights, attention=attention)


def flops(config: BertConfig, batch: int, length: int, fraction: float = MASKED) -> float:
    """Operations of a step's matrix products, 2 per multiply-add; backward counts twice, and nothing is recomputed.

    `fraction` of the tokens is predicted; the head runs only on these.
    """
    h, tokens = config.hidden_size, batch * length
    dense = config.layers * tokens * 2 * (4 * h * h + 2 * h * config.intermediate_size)
    attention = config.layers * tokens * 2 * 2 * length * h
    head = batch * predictions(length, fraction) * 2 * (h * h + h * config.vocab_size)
    return 3.0 * (dense + attention + head)


def workload(model: str, mode: str, precision: str, batch: int, length: int) -> Workload:
    """Masked language modelling of random tokens by AdamW, parameters in fp32."""
    config, numbers = config_of(model, mode), precision_of(precision)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        loss, _ = mlm_loss(numbers.cast(model), batch, key if config.hidden_dropout else None)
        return loss.value

    return Workload(
        name=f"{model}, {mode}, {precision}, {batch} x {length}",
        model=lambda: Bert(config, key=jax.random.key(0)),
        loss_fn=loss_fn,
        # BERT's own epsilon (arXiv:1810.04805's code); Adam turns rounding into steps with a smaller one.
        optimizer=optax.adamw(1e-4, eps=1e-6, weight_decay=0.01),
        batch=synthetic_batch(config, batch, length, jax.random.key(1)),
        key=jax.random.key(2),
        flops=flops(config, batch, length),
    )
