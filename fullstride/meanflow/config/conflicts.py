"""Settings that exclude each other, or that one alone is not enough of."""

from collections.abc import Iterator

from fullstride.meanflow.config.schema import DataConfig, LossConfig, TrainConfig
from fullstride.meanflow.objective.derivative import APART
from fullstride.meanflow.objective.loss import SAME_LOSS
from fullstride.meanflow.objective.times import meanflow_count

AUGMENTED = ("song_unet", "song_unet_tiny")
FOLDERS = ("image_folder", "latents")
MADE = ("digits", "deterministic", "multiclass")


def together(config: TrainConfig) -> Iterator[tuple[str, bool, str]]:
    """What was received, whether it cannot be, and what was expected."""
    loss, data, model = config.loss, config.data, config.model
    yield (
        "resume=true overwrite=true",
        config.resume and config.overwrite,
        "one of them; resume goes on, overwrite deletes the run",
    )
    # Flow matching has neither: a value given here would be ignored.
    for key in ("meanflow_ratio", "weighting_power"):
        value = getattr(loss, key)
        yield (
            f"loss.{key}={value}",
            loss.name == "mse" and value != 0,
            "0 for loss=mse; leave it out or use loss=meanflow",
        )
    yield (
        f"loss.weighting=huber loss.weighting_power={loss.weighting_power}",
        loss.weighting == "huber" and loss.weighting_power == 0,
        "a power above 0, such as 0.75: at 0 every weight is 1; or leave loss.weighting out",
    )
    yield (
        f"loss.weighting=huber data.batch_size={data.batch_size}",
        loss.weighting == "huber" and data.batch_size < 2,
        "at least 2 samples, as others tell what error is usual; or loss.weighting=adaptive",
    )
    curved = meanflow_count(loss.meanflow_ratio, data.batch_size)
    yield (
        f"data.batch_size={data.batch_size} loss.meanflow_ratio={loss.meanflow_ratio}, which is {curved} samples",
        loss.split in SAME_LOSS and 0 < loss.meanflow_ratio < 1 and curved in (0, data.batch_size),
        "samples with r != t and samples with r = t in each batch; raise data.batch_size, or use loss.split=bernoulli, "
        "which draws each sample's side",
    )
    guided = loss.omega != 1 or loss.kappa != 0
    yield (
        "loss.omega, loss.kappa or loss.label_dropout with loss=mse",
        loss.name == "mse" and (guided or loss.label_dropout > 0),
        "none of them: guidance enters MeanFlow's target; use loss=meanflow, with loss.meanflow_ratio=0 if r = t",
    )
    for key, used in (("omega and loss.kappa", guided), ("label_dropout", loss.label_dropout > 0)):
        yield f"loss.{key}", used and not model.class_conditional, "model.class_conditional=true beside guidance"
    yield (
        f"loss.guidance_start={loss.guidance_start} loss.guidance_end={loss.guidance_end}",
        loss.guidance_start > loss.guidance_end,
        "a start that is not above the end",
    )
    yield (
        "loss.omega and loss.kappa without loss.label_dropout",
        guided and loss.label_dropout == 0,
        "loss.label_dropout above 0, such as 0.1: guidance needs the velocity of 'no class', which is trained so",
    )
    yield from _ignored(config)
    yield (
        "loss=imf_ema distributed=fsdp",
        loss.name == "imf_ema" and config.distributed == "fsdp",
        "an average that is whole on each process, as with distributed=ddp, or loss=imf",
    )
    apart = loss.jvp_precision != "same"
    yield (
        f"loss.jvp_precision={loss.jvp_precision} loss.jvp_backend={loss.jvp_backend}",
        apart and loss.jvp_backend not in APART,
        f"loss.jvp_backend={' or '.join(APART)} beside it; the others' derivative shares its pass with the prediction",
    )
    yield (
        f"loss.split=shared loss.jvp_backend={loss.jvp_backend} loss.jvp_chunk={loss.jvp_chunk}",
        loss.split == "shared" and (loss.jvp_backend != "func" or loss.jvp_chunk > 0),
        "loss.jvp_backend=func and loss.jvp_chunk=0, as its tangents share the batch's pass; or loss.split=static",
    )
    # Products of fp32 are the process's: only what autocast rounds can be another inside a step.
    yield (
        f"loss.jvp_precision={loss.jvp_precision} precision={config.precision}",
        apart and "bf16" not in (loss.jvp_precision, config.precision),
        "bf16 for one of them, or loss.jvp_precision=same",
    )
    # A compiled step draws dropout anew in each pass of the network: the passes would be of different networks.
    compiled = "compile" in config.backend or (config.backend == "auto" and not config.guard.check_step)
    dropout = getattr(model, "dropout", 0.0)
    yield (
        f"backend={config.backend} loss.jvp_backend={loss.jvp_backend} model.dropout={dropout}",
        compiled and loss.jvp_backend in APART and loss.meanflow_ratio > 0 and dropout > 0,
        "loss.jvp_backend=func, backend=eager or model.dropout=0: compiled, the passes of that derivative would each "
        "drop other units",
    )
    yield (
        f"channels_last=true model={model.name}",
        config.channels_last and model.name.startswith("dit"),
        "a network of convolutions, or channels_last=false",
    )
    yield (
        f"data.augment={data.augment}",
        data.augment > 0 and model.name not in AUGMENTED,
        f"model={' or '.join(AUGMENTED)}, the networks that are told how a picture was augmented",
    )
    yield f"data={data.name}", data.name in FOLDERS and not data.path, f"data.path=FOLDER with data={data.name}"
    yield (
        f"data.path={data.path}",
        data.name in MADE and data.path != "",
        f"no data.path with data={data.name}, which comes with scikit-learn",
    )
    yield (
        f"data.allow_changed=true data={data.name}",
        data.allow_changed and data.name != "image_folder",
        "data=image_folder beside it; other data are to be those that the run was begun with",
    )
    yield (
        f"data.skip_damaged={data.skip_damaged} data={data.name}",
        data.skip_damaged > 0 and data.name != "image_folder",
        "data=image_folder beside it, whose pictures are read one by one",
    )
    yield "data.check=true", data.check and data.name not in FOLDERS, f"data={' or '.join(FOLDERS)} beside it"
    latents = data.name == "latents"
    yield "data.augment with data=latents", latents and data.augment > 0, "pictures; latents are mirrored at most"
    yield (
        "data.image_size with data=latents",
        latents and data.image_size > 0,
        "data.image_size=0: latents stay as stored",
    )
    yield (
        "evaluation.features",
        latents and len(config.evaluation.features) > 0,
        "none with data=latents: they are defined on pictures; the energy distance is always there",
    )
    yield (
        "evaluation.features=[inception]",
        "inception" in config.evaluation.features and not config.evaluation.inception_weights,
        "evaluation.inception_weights=FILE beside it, the weights that torch-fidelity downloads",
    )


def _ignored(config: TrainConfig) -> Iterator[tuple[str, bool, str]]:
    """Likewise of values that nothing would read beside the others, where a run would not be the one that was meant."""
    loss, data = config.loss, config.data
    for key in ("logit_normal_mean", "logit_normal_std"):
        yield (
            f"loss.{key}={getattr(loss, key):g} loss.time_law={loss.time_law}",
            _changed(loss, LossConfig, key) and loss.time_law == "uniform",
            "loss.time_law=v0 or v1 beside it, as uniform times have none; or leave it out",
        )
    for key in ("r_logit_normal_mean", "r_logit_normal_std"):
        yield (
            f"loss.{key}={getattr(loss, key):g} loss.time_law={loss.time_law}",
            _changed(loss, LossConfig, key) and loss.time_law != "v1",
            "loss.time_law=v1 beside it, as the other laws have none for r; or leave it out",
        )
    yield (
        f"data.latent_scale={data.latent_scale:g}",
        _changed(data, DataConfig, "latent_scale") and data.name != "latents",
        f"none with data={data.name}; leave it out, it is for data=latents",
    )
    yield (
        f"data.holdout={data.holdout:g}",
        _changed(data, DataConfig, "holdout") and data.name not in FOLDERS,
        f"none with data={data.name}, which has a held-out half; leave it out, it is for data={' or '.join(FOLDERS)}",
    )
    yield (
        f"data.fit={data.fit}",
        data.fit != DataConfig.fit and data.image_size == 0,
        "data.image_size=PIXELS beside it, or leave it out: the stored size stays",
    )


def _changed(config: object, kind: type, key: str) -> bool:
    return getattr(config, key) != getattr(kind, key)
