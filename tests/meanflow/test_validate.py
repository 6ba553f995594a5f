import math
from dataclasses import replace
from operator import attrgetter

import pytest

from fullstride.errors import ConfigError
from fullstride.meanflow.config import LossConfig, ModelConfig, TrainConfig
from fullstride.meanflow.presets import KEYS, LOSS_PRESETS, MODEL_PRESETS
from fullstride.meanflow.validate import NAMES, RULES, validate


def _with(key: str, value: object) -> TrainConfig:
    config = TrainConfig()
    group, _, leaf = key.rpartition(".")
    setattr(attrgetter(group)(config) if group else config, leaf, value)
    return config


GOOD = {
    "loss.meanflow_ratio": [0.0, 1.0],
    "loss.weighting_power": [0.0, 0.75],
    "loss.time_law": ["v0", "v1", "uniform"],
    "loss.jvp_backend": ["func", "forward_ad", "two_pass", "finite_difference"],
    "loss.logit_normal_mean": [-2.0, 0.0, 3.0],
    "model.dropout": [0.0, 0.999],
    "model.channels": [2, 24],
    "model.attention_resolutions": [[], [4, 8]],
    "ema.decay": [0.0],
    "evaluation.num_samples": [0, 2],
    "device": ["auto", "cpu", "cuda", "mps"],
    "precision": ["fp32", "tf32", "bf16"],
    "epochs": [1],
    "run_name": ["a", "a.b", "lr 1e-4,p=1", ".hidden"],
}
BAD = {
    "loss.meanflow_ratio": [-0.01, 1.01, math.nan],
    "loss.logit_normal_std": [0.0, -1.0, math.inf, math.nan],
    "loss.r_logit_normal_std": [0.0],
    "loss.logit_normal_mean": [math.inf, math.nan],
    "loss.r_logit_normal_mean": [-math.inf],
    "loss.weighting_power": [-0.5, math.nan],
    "loss.weighting_eps": [0.0],
    "loss.time_law": ["v2"],
    "loss.split": ["dynamic"],
    "loss.jvp_backend": ["reverse"],
    "loss.name": ["msee"],
    "data.name": ["mnist"],
    "model.name": ["dit"],
    "optimizer.name": ["sgd"],
    "data.batch_size": [0, -1],
    "gradient_accumulation_steps": [0],
    "epochs": [0, -3],
    "optimizer.lr": [0.0, -1e-4, math.inf, math.nan],
    "optimizer.eps": [0.0],
    "optimizer.beta1": [1.0, -0.1],
    "optimizer.beta2": [1.0],
    "optimizer.decay": ["linear"],
    "optimizer.weight_decay": [-0.1],
    "optimizer.warmup_steps": [-1],
    "optimizer.grad_clip": [-1.0],
    "model.dropout": [1.0, -0.1],
    "model.channels": [0, 1, 25, -2],
    "model.channel_mult": [[], [1, 0]],
    "model.num_blocks": [0],
    "model.attention_resolutions": [[0]],
    "model.time_max_frequency": [0.5, math.inf],
    "ema.decay": [1.0, -0.1],
    "ema.period": [0],
    "evaluation.num_samples": [1, -1],
    "evaluation.batch_size": [0],
    "evaluation.steps": [[], [0]],
    "precision": ["fp16"],
    "device": ["tpu"],
    "seed": [-1, 2**32],
    "eval_every": [-1],
    "save_every": [-1],
    "log_every": [0],
    "run_name": ["", " ", ".", "..", "a/b", "a\\b", "../a"],
}


def test_the_defaults_and_the_presets_are_valid():
    validate(TrainConfig())
    for preset in MODEL_PRESETS.values():
        validate(TrainConfig(model=ModelConfig(**preset)))
    for preset in LOSS_PRESETS.values():
        validate(TrainConfig(loss=LossConfig(**preset)))


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in GOOD.items() for value in values])
def test_a_possible_value_passes(key, value):
    validate(_with(key, value))


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_an_impossible_value_is_named_with_what_was_expected(key, value):
    with pytest.raises(ConfigError, match="expected ") as raised:
        validate(_with(key, value))
    assert str(raised.value).startswith(f"{key}={value}: ")
    assert "\n" not in str(raised.value)


def test_every_key_that_can_be_wrong_has_a_rule():
    ruled = set(NAMES) | {key for rule in RULES for key in rule.keys}
    free = {key for key, kind in KEYS.items() if kind is bool} | {"output_dir"}
    assert set(KEYS) - ruled == free
    assert set(BAD) == ruled


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("precision", "bf_16", "bf16"),
        ("loss.jvp_backend", "fwd_ad", "forward_ad"),
        ("loss.split", "bernouli", "bernoulli"),
        ("loss.time_law", "unifrom", "uniform"),
        ("optimizer.decay", "cosin", "cosine"),
    ],
)
def test_the_nearest_name_is_suggested(key, value, nearest):
    with pytest.raises(ConfigError, match=f"expected one of {nearest}, .*did you mean {nearest}?"):
        validate(_with(key, value))


def test_resume_and_overwrite_exclude_each_other():
    with pytest.raises(ConfigError, match="resume=true overwrite=true: expected one of them"):
        validate(TrainConfig(resume=True, overwrite=True))


@pytest.mark.parametrize("key", ["meanflow_ratio", "weighting_power"])
def test_flow_matching_refuses_values_that_it_would_ignore(key):
    loss = replace(LossConfig(**LOSS_PRESETS["mse"]), **{key: 0.5})
    with pytest.raises(ConfigError, match=f"loss.{key}=0.5: expected 0 for loss=mse; .* use loss=meanflow"):
        validate(TrainConfig(loss=loss))
