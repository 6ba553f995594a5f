"""Settings that the experiments on MeanFlow share, by scale."""

from benchmarks.experiments.meanflow.spec import Sampler
from fullstride.meanflow.config.recipes import TIMES_V1

Settings = dict[str, str]

SCALES = ("smoke", "cpu", "gpu")
TINY: Settings = {"model": "unet_tiny", "model.class_conditional": "true", "model.time_max_frequency": "16.0"}
SMOKE: Settings = TINY | {
    "model.channels": "8",
    "data.batch_size": "256",
    "epochs": "1",
    "evaluation.num_samples": "16",
    "ema.decays": "[0.9]",
    "device": "cpu",
    "guard.check_tangents": "false",
    "guard.check_step": "false",
}

# Real pictures, with the recipe that one step needs.
RECIPE: Settings = TIMES_V1 | {
    "loss.meanflow_ratio": "0.75",
    "loss.weighting_power": "0.75",
    "loss.weighting_eps": "1e-3",
}
DIGITS: Settings = TINY | {
    "data": "digits",
    "data.batch_size": "64",
    "optimizer.lr": "1.5e-3",
    "optimizer.warmup_steps": "50",
    "optimizer.decay": "cosine",
    "ema.decays": "[0.999]",
    "device": "cpu",
}
FASHION: Settings = {
    "preset": "fashion_mnist",
    "optimizer.decay": "cosine",
    "ema.decays": "[0.999]",
    "save_every": "0",
    "precision": "bf16",
    "backend": "compile+graph",
    "channels_last": "true",
    "device": "cuda",
    "evaluation.num_samples": "5000",
}
SHORT = {
    "smoke": SMOKE | {"data": "digits"},
    "cpu": DIGITS | {"epochs": "25"},
    "gpu": FASHION | {"epochs": "20"},
}
LONG = {
    "smoke": SMOKE | {"data": "digits"},
    "cpu": DIGITS | {"epochs": "70"},
    "gpu": FASHION | {"epochs": "60"},
}
# Thousands of evaluations of a network on a GPU: in TF32, with one launch each.
SAMPLED_FAST: Settings = {"evaluation.precision": "tf32", "evaluation.backend": "graph"}
V0: Settings = {"loss.time_law": "v0", "loss.logit_normal_mean": "-2.0", "loss.logit_normal_std": "2.0"}
IMAGENET: Settings = V0 | {"loss.logit_normal_mean": "-0.4", "loss.logit_normal_std": "1.0"}
FEW: tuple[Sampler, ...] = (("meanflow", 1), ("meanflow", 2), ("euler", 16))
NO_LABELS: Settings = {"model.class_conditional": "false"}
