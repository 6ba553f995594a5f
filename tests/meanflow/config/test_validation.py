import math
from dataclasses import replace
from operator import attrgetter

import pytest

from fullstride.errors import ConfigError
from fullstride.meanflow.config.objectives import OBJECTIVES
from fullstride.meanflow.config.overrides import validate
from fullstride.meanflow.config.presets import KEYS, LOSSES, MODELS, WITH_KEYS_OF_THEIR_OWN, chosen
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.settings.fields import walk


def _set(config: TrainConfig, key: str, value: object) -> None:
    group, _, leaf = key.rpartition(".")
    setattr(attrgetter(group)(config) if group else config, leaf, value)


def _with(key: str, value: object) -> TrainConfig:
    group, _, leaf = key.rpartition(".")
    made = [{"model": name} for name in ("unet", "dit_b2", "mit_b2", "token_dit")] + [{"loss": name} for name in LOSSES]
    config = next(found for found in map(chosen, made) if not group or hasattr(getattr(found, group), leaf))
    _set(config, key, value)
    return config


def _changed(changes: dict[str, object]) -> TrainConfig:
    config = chosen({"model": str(changes.get("model.name", "unet"))})
    for key, value in changes.items():
        _set(config, key, value)
    return config


GOOD = {
    "loss.meanflow_ratio": [0.0, 1.0],
    "loss.weighting_power": [0.0, 0.75],
    "loss.time_law": ["v0", "v1", "uniform"],
    "loss.weighting": ["adaptive", "huber"],
    "loss.jvp_backend": ["func", "forward_ad", "two_pass", "finite_difference"],
    "loss.jvp_chunk": [0, 1, 16],
    "loss.split": ["auto", "static", "shared", "full", "bernoulli"],
    "loss.logit_normal_mean": [-2.0, 0.0, 3.0],
    "model.dropout": [0.0, 0.999],
    "model.channels": [2, 24],
    "model.attention_resolutions": [[], [4, 8]],
    "ema.decays": [[0.0], [0.9, 0.99]],
    "evaluation.num_samples": [0, 4],
    "evaluation.precision": ["fp32", "tf32", "bf16"],
    "evaluation.backend": ["auto", "eager", "graph"],
    "guard.spike": [0.0, 1.5],
    "keep": [0, 1],
    "save_every": [0, 3, "7", "500steps", "1 step", "10min", "0.5 min"],
    "ema.widths": [[], [0.05, 0.1]],
    "model.time_scale": [1000.0],
    "data.workers": [0],
    "data.num_classes": [0],
    "data.skip_damaged": [0],
    "device": ["auto", "cpu", "cuda", "mps"],
    "backend": ["eager", "graph", "compile", "compile+graph", "auto"],
    "distributed": ["none", "ddp", "fsdp"],
    "transfers": ["nccl", "copies", "auto"],
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
    "loss.weighting": ["mean"],
    "loss.split": ["dynamic"],
    "loss.jvp_backend": ["reverse"],
    "loss.jvp_chunk": [-1],
    "loss.jvp_precision": ["fp16"],
    "backend": ["captured"],
    "distributed": ["zero"],
    "transfers": ["gloo"],
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
    "ema.decays": [[1.0], [0.9, 0.9], [-0.1]],
    "ema.widths": [[0.0], [0.2886], [0.1, 0.1]],
    "optimizer.momentum": [1.0, -0.1],
    "model.time_scale": [0.0, math.inf],
    "init_form": ["sd"],
    "model.depth": [0],
    "model.width": [0],
    "model.heads": [0],
    "model.patch_size": [0],
    "model.patch_sizes": [[], [0]],
    "loss.omega": [math.nan],
    "loss.kappa": [1.0, -0.1],
    "loss.guidance_start": [-0.1],
    "loss.guidance_end": [1.1],
    "loss.label_dropout": [1.1],
    "loss.tangent": ["teachers"],
    "loss.teacher_ema": [1.0],
    "loss.teacher_guidance": [math.inf],
    "loss.tangent_warmup": [1.1],
    "loss.tangent_limit": [-1.0],
    "loss.flow_until": [1.1],
    "loss.exact_from": [-0.1],
    "loss.least_alpha": [0.0, 1.0],
    "loss.features": ["", "vgg"],
    "loss.perceptual_weight": [-1.0, math.nan],
    "loss.perceptual_until": [-0.1, 1.1],
    "loss.path_steps": [0],
    "loss.path_pairs": [0],
    "loss.largest_scale": [0.5, math.inf],
    "loss.scale_power": [math.nan],
    "model.decoupled_blocks": [-1],
    "model.head_blocks": [0],
    "model.prediction": ["e"],
    "data.augment": [-0.1, 2.0],
    "data.holdout": [0.0, 1.0],
    "data.latent_scale": [0.0],
    "data.image_size": [-1],
    "data.workers": [-1],
    "data.num_classes": [-1],
    "data.skip_damaged": [-1],
    "data.max_megapixels": [0, 179],
    "data.fit": ["stretch"],
    "guard.spike": [0.5, 1.0, -1.0, math.inf],
    "guard.max_skips": [0],
    "guard.max_rollbacks": [-1],
    "guard.stall_seconds": [-1.0],
    "watch.first_step_minutes": [-1.0],
    "watch.step_minutes": [-0.5, math.inf],
    "watch.gpu_idle_minutes": [math.nan],
    "watch.checkpoint_factor": [0.5, 1.0, -1.0],
    "watch.checkpoint_minutes": [-1.0],
    "watch.evaluation_minutes": [-1.0],
    "keep": [-1],
    "track": ["wandbs"],
    "project": ["", "a/b"],
    "evaluation.features": [["fid"], ["classifier", "classifier"]],
    "ema.period": [0],
    "evaluation.num_samples": [1, 3, -1],
    "evaluation.precision": ["fp16"],
    "evaluation.backend": ["compile"],
    "evaluation.batch_size": [0],
    "evaluation.steps": [[], [0]],
    "precision": ["fp16"],
    "device": ["tpu"],
    "seed": [-1, 2**32],
    "eval_every": [-1],
    "save_every": [-1, "0min", "0steps", "10 h", "-5min", "steps", "1.5", ""],
    "log_every": [0],
    "run_name": ["", " ", ".", "..", "a/b", "a\\b", "../a"],
    "output_dir": ["", " "],
}


def test_the_defaults_and_the_presets_are_valid():
    validate(TrainConfig())
    for name in MODELS:
        validate(chosen({"model": name, "loss": "imf_whole" if name.startswith("mit") else "meanflow"}))
    for name in LOSSES:
        config = chosen({"loss": name, "model": "mit_tiny" if name == "imf_whole" else "unet"})
        config.loss.teacher = "runs/flow" if OBJECTIVES[name].taught else ""
        validate(config)


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
    ruled = {key.name for made in WITH_KEYS_OF_THEIR_OWN for key in walk(chosen(made)) if key.rules}
    ruled |= {"data.name", "model.name", "loss.name", "optimizer.name"}
    free = {name for name, key in KEYS.items() if key.kind is bool}
    free |= {"data.path", "evaluation.inception_weights", "loss.teacher", "init_from"}
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
    loss = replace(LOSSES["mse"](), **{key: 0.5})
    with pytest.raises(ConfigError, match=f"loss.{key}=0.5: expected 0 for loss=mse; .* use loss=meanflow"):
        validate(TrainConfig(loss=loss))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ema.decays": []}, "ema.decays=[] ema.widths=[]: expected at least one average"),
        ({"loss.omega": 2.0}, "expected model.class_conditional=true with guidance"),
        ({"loss.label_dropout": 0.1}, "expected model.class_conditional=true"),
        ({"loss.omega": 2.0, "model.class_conditional": True}, "expected loss.label_dropout above 0"),
        ({"loss.guidance_start": 0.9, "loss.guidance_end": 0.1}, "expected a start no larger than the end"),
        ({"data.augment": 0.1}, "data.augment=0.1: expected model=song_unet or song_unet_tiny"),
        ({"data.name": "image_folder"}, "expected data.path=FOLDER with data=image_folder"),
        ({"data.path": "x"}, "data.path=x: expected no data.path with data=digits"),
        ({"data.name": "latents", "data.path": "x", "data.image_size": 32}, "latents stay as stored"),
        (
            {"data.name": "latents", "data.path": "x", "evaluation.features": ["classifier"]},
            "expected none with data=latents",
        ),
        (
            {"loss.split": "shared", "loss.jvp_backend": "two_pass"},
            "expected loss.jvp_backend=func and loss.jvp_chunk=0",
        ),
        ({"loss.split": "shared", "loss.jvp_chunk": 4}, "loss.split=shared loss.jvp_backend=func loss.jvp_chunk=4"),
        ({"loss.jvp_precision": "bf16"}, "jvp_backend=func: expected loss.jvp_backend=two_pass or finite_difference"),
        (
            {"loss.jvp_precision": "tf32", "loss.jvp_backend": "two_pass"},
            "loss.jvp_precision=tf32 precision=fp32: expected bf16 for one of them",
        ),
        (
            {"backend": "compile", "loss.jvp_backend": "finite_difference", "model.dropout": 0.1},
            "backend=compile loss.jvp_backend=finite_difference model.dropout=0.1: expected loss.jvp_backend=func, ",
        ),
        (
            {"guard.check_step": False, "backend": "auto", "loss.jvp_backend": "two_pass", "model.dropout": 0.1},
            "each pass of this derivative would drop different units",
        ),
        (
            {"data.batch_size": 1},
            "data.batch_size=1 loss.meanflow_ratio=0.25: expected samples with r != t and samples with r = t in each",
        ),
        ({"data.batch_size": 1, "loss.meanflow_ratio": 0.75}, "loss.meanflow_ratio=0.75: expected samples with"),
        ({"channels_last": True, "model.name": "dit_b2"}, "channels_last=true model=dit_b2: expected a network of"),
        ({"evaluation.features": ["inception"]}, "expected evaluation.inception_weights=FILE"),
        ({"loss.name": "imf_ema", "distributed": "fsdp"}, "loss=imf_ema distributed=fsdp: expected "),
        (
            {"loss.weighting": "huber", "data.batch_size": 1, "loss.split": "bernoulli"},
            "loss.weighting=huber data.batch_size=1: expected at least 2 samples",
        ),
        # Nothing would read them.
        (
            {"loss.weighting": "huber", "loss.weighting_power": 0.0},
            "loss.weighting_power=0.0: expected a power above 0",
        ),
        (
            {"loss.r_logit_normal_mean": -1.0},
            "loss.r_logit_normal_mean=-1.0 loss.time_law=v0: expected loss.time_law=v1",
        ),
        (
            {"loss.r_logit_normal_std": 1.0, "loss.time_law": "uniform"},
            "expected loss.time_law=v1, since the other laws",
        ),
        (
            {"loss.logit_normal_mean": -2.0, "loss.time_law": "uniform"},
            "loss.logit_normal_mean=-2.0 loss.time_law=uniform: expected loss.time_law=v0 or v1, since the other laws",
        ),
        (
            {"loss.logit_normal_std": 2.0, "loss.time_law": "uniform"},
            "expected loss.time_law=v0 or v1, since the other laws",
        ),
        ({"data.latent_scale": 0.5}, "data.latent_scale=0.5: expected none with data=digits"),
        ({"data.holdout": 0.4}, "data.holdout=0.4: expected none with data=digits, which has a held-out half"),
        ({"data.fit": "crop"}, "data.fit=crop: expected data.image_size=PIXELS as well"),
        ({"data.name": "latents", "data.path": "x", "data.fit": "resize"}, "data.fit=resize: expected data.image_size"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes, message):
    config = _changed(changes)
    with pytest.raises(ConfigError) as raised:
        validate(config)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "compile", "model.dropout": 0.1},
        {"backend": "compile", "loss.jvp_backend": "two_pass"},
        {"backend": "eager", "loss.jvp_backend": "two_pass", "model.dropout": 0.1},
        # The first step of each form is compared with eager, so that a wrong one is not chosen.
        {"backend": "auto", "loss.jvp_backend": "two_pass", "model.dropout": 0.1},
    ],
)
def test_passes_that_drop_the_same_units_are_allowed(changes):
    validate(_changed(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss.r_logit_normal_mean": -1.0, "loss.r_logit_normal_std": 1.0, "loss.time_law": "v1"},
        {"data.name": "latents", "data.path": "x", "data.latent_scale": 0.5, "data.holdout": 0.2},
        {
            "data.name": "image_folder",
            "data.path": "x",
            "data.holdout": 0.2,
            "data.fit": "resize",
            "data.image_size": 8,
        },
        {
            "model.class_conditional": True,
            "loss.label_dropout": 0.1,
            "loss.omega": 2.0,
            "loss.guidance_start": 0.1,
            "loss.guidance_end": 0.8,
        },
    ],
)
def test_values_that_are_read_are_allowed(changes):
    validate(_changed(changes))


@pytest.mark.parametrize(("precision", "jvp_precision"), [("bf16", "fp32"), ("bf16", "tf32"), ("fp32", "bf16")])
@pytest.mark.parametrize("backend", ["two_pass", "finite_difference"])
def test_a_derivative_of_its_own_may_have_another_format(precision, jvp_precision, backend):
    config = TrainConfig(precision=precision)
    config.loss.jvp_backend, config.loss.jvp_precision = backend, jvp_precision
    validate(config)
