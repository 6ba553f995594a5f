"""Published recipes, as `preset=cifar10_paper`: settings that the command line's own win over."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """The settings of a published run, in the command line's spelling.

    Attributes:
        source: origin of the numbers, and the results published with them.
        settings: group choices and keys.

    """

    source: str
    settings: dict[str, str]


# The law of t and r of py-meanflow's cifar10_v1: each of its own, r's near 0.
TIMES_V1 = {
    "loss.time_law": "v1",
    "loss.logit_normal_mean": "-0.6",
    "loss.logit_normal_std": "1.6",
    "loss.r_logit_normal_mean": "-4.0",
    "loss.r_logit_normal_std": "1.6",
}


def as_read(recipe: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """A recipe's settings, without those of its law of the times where uniform times are given in its place."""
    unread = given.get("loss.time_law") == "uniform"
    return {key: value for key, value in recipe.items() if not (unread and "logit_normal" in key)}


_CIFAR10 = {
    "data": "cifar10",
    "data.batch_size": "256",
    "gradient_accumulation_steps": "4",
    "data.hflip": "true",
    "data.augment": "0.12",
    "model": "song_unet",
    "model.dropout": "0.2",
    "loss.meanflow_ratio": "0.75",
    "loss.weighting_power": "0.75",
    "loss.weighting_eps": "1e-3",
    "optimizer.lr": "6e-4",
    "optimizer.beta1": "0.9",
    "optimizer.beta2": "0.999",
    "optimizer.warmup_steps": "9600",
    "ema.decays": "[0.99995,0.9999,0.9996]",
    "ema.period": "16",
    "ema.warmup": "false",
    "precision": "tf32",
    "epochs": "16000",
    "save_every": "100",
    "eval_every": "400",
}


ABLATION = "the paper's ablation, guidance scale 3 as omega 3 and kappa 0 (section 4.2); FID 15.53 with one step"


def _imagenet(model: str, omega: str, kappa: str, end: str, epochs: str, source: str) -> Recipe:
    """ImageNet's latents by one network.

    A guidance scale s alone is omega = s and kappa = 0, v_g = s v + (1 - s) u(z, t, t): arXiv:2505.13447, section 4.2.
    With kappa, as in appendix B.1, the scale is omega / (1 - kappa): 2 of 1 and 0.5, 2.5 of 0.2 and 0.92.
    """
    settings = {
        "data": "latents",
        "data.num_classes": "1000",
        "data.hflip": "false",  # the released training does not mirror latents
        "data.batch_size": "256",
        "data.workers": "4",
        "model": model,
        "model.class_conditional": "true",
        "loss.meanflow_ratio": "0.25",
        "loss.logit_normal_mean": "-0.4",
        "loss.logit_normal_std": "1.0",
        "loss.weighting_power": "1.0",
        "loss.weighting_eps": "1e-2",
        "loss.omega": omega,
        "loss.kappa": kappa,
        "loss.guidance_end": end,
        "loss.label_dropout": "0.1",
        "optimizer.lr": "1e-4",
        "optimizer.beta2": "0.95",
        "ema.decays": "[0.9999]",
        "ema.warmup": "false",
        "epochs": epochs,
        "save_every": "1",
        "eval_every": "10",
    }
    return Recipe(f"arXiv:2505.13447 and Gsunshine/meanflow; sd-vae-ft-mse latents, 4x32x32; {source}", settings)


# Guidance that a network is not given as an input.
_INSIDE_THE_TARGET = ("loss.omega", "loss.kappa", "loss.guidance_end")
RECIPES: dict[str, Recipe] = {
    "cifar10_paper": Recipe(
        "arXiv:2505.13447, appendix A, and Gsunshine/py-meanflow cifar10_v0.sh; batch 1024 as 4 x 256 on one device "
        "(8 x 128 there); FID 2.92 with one step",
        _CIFAR10
        | {
            "loss.time_law": "v0",
            "loss.logit_normal_mean": "-2.0",
            "loss.logit_normal_std": "2.0",
        },
    ),
    "cifar10_v1": Recipe(
        "Gsunshine/py-meanflow cifar10_v1.sh; batch 1024 as 4 x 256 on one device; its checkpoint has FID 2.80",
        _CIFAR10 | TIMES_V1,
    ),
    "fashion_mnist": Recipe(
        "this project's own: times and weight of cifar10_v1, a U-Net of 6.5M weights",
        TIMES_V1
        | {
            "data": "fashion_mnist",
            "data.image_size": "32",
            "data.batch_size": "256",
            "model": "unet_medium",
            "model.channels": "64",
            "model.dropout": "0.1",
            "model.class_conditional": "true",
            "loss.meanflow_ratio": "0.75",
            "loss.weighting_power": "0.75",
            "loss.weighting_eps": "1e-3",
            "optimizer.lr": "1e-3",
            "optimizer.beta2": "0.99",
            "optimizer.warmup_steps": "500",
            "ema.decays": "[0.9995,0.999]",
            "epochs": "400",
            "save_every": "10",
            "log_every": "100",
        },
    ),
    "imagenet256_imf_b2": Recipe(
        "arXiv:2512.02012 and Lyy-iiis/imeanflow; batch 1024 as 4 x 256; sd-vae-ft-mse latents, 4x32x32; FID 3.39 with "
        "one step, guidance chosen at sampling",
        {key: x for key, x in _imagenet("", "", "", "", "640", "").settings.items() if key not in _INSIDE_THE_TARGET}
        | {
            "gradient_accumulation_steps": "4",
            "model": "mit_b2",
            "loss": "imf_whole",
            "loss.meanflow_ratio": "0.5",
            "optimizer.warmup_steps": "12510",
        },
    ),
    "imagenet256_b4": _imagenet("dit_b4", "1.0", "0.5", "1.0", "240", "run_b4.yml, FID 11.35 with one step"),
    "imagenet256_b4_cfg3": _imagenet("dit_b4", "3.0", "0.0", "1.0", "80", ABLATION),
    "imagenet256_b2": _imagenet("dit_b2", "1.0", "0.5", "1.0", "240", "FID 6.17"),
    "imagenet256_m2": _imagenet("dit_m2", "1.0", "0.5", "1.0", "240", "FID 5.01"),
    "imagenet256_l2": _imagenet("dit_l2", "0.2", "0.92", "0.8", "240", "FID 3.84"),
    "imagenet256_xl2": _imagenet("dit_xl2", "0.2", "0.92", "0.75", "240", "FID 3.43"),
}
