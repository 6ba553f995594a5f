"""From settings to their objects: device, model, step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from fullstride.bert.data.catalogue import Data, HeldOut, data_of
from fullstride.bert.data.rows import Vocabulary
from fullstride.bert.data.stream import Batches
from fullstride.bert.model.attention import chosen
from fullstride.bert.model.bert import Bert
from fullstride.bert.model.config import BertConfig
from fullstride.bert.model.weights import load, shapes_of
from fullstride.bert.training.evaluate import Evaluator
from fullstride.bert.training.loss import mlm_loss
from fullstride.bert.training.optimizer import optimizer_of
from fullstride.bert.training.settings import ModelSettings, TrainSettings, validate
from fullstride.errors import ConfigError
from fullstride.runs.trackers.tracker import check_tracker
from fullstride.step.jax import TrainStep, data_parallel, fsdp
from fullstride.step.jax.compile_cache import keep_compiled
from fullstride.step.jax.precision import precision_of

SHARDINGS = {"none": lambda: None, "dp": data_parallel, "fsdp": fsdp}


def use_device(name: str) -> str:
    """Have JAX run on `cpu` or `gpu`, or on its default for `auto`; returns the name of the backend.

    Raises:
        ConfigError: if a named one is not there, or JAX runs elsewhere already.

    """
    if name == "cpu":
        jax.config.update("jax_platforms", "cpu")
    backend = jax.default_backend()
    if name not in ("auto", backend):
        remedy = "install jax[cuda13] and check nvidia-smi" if name == "gpu" else "begin a new process"
        raise ConfigError(f"device={name}: JAX runs on {backend}; {remedy}, or use device=auto")
    return backend


def begin(settings: TrainSettings) -> None:
    """Check the settings and select JAX's device; on a GPU compiled programs are cached.

    Raises:
        ConfigError: for settings that cannot work here.

    """
    validate(settings)
    check_tracker(settings.track)
    if use_device(settings.device) == "gpu":
        keep_compiled()


def data_for(settings: TrainSettings, own: Path | None = None) -> tuple[Data, Batches]:
    """The texts of a run and its batches; `own` is the run's tokenizer, if it has one already."""
    data, init = settings.data, settings.model.init
    # The weights of `model.init` know its tokenizer, unless another is named.
    named = own or (Path(init).expanduser() if init and not data.tokenizer else None)
    found = data_of(data, settings.evaluation.size, named)
    batches = Batches(found.train, data.batch_size, settings.seed, data.mask_fraction, whole_words=data.whole_words)
    return found, batches


def _changes(settings: ModelSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("hidden_dropout", "attention_dropout", "attention")}


def model_of(
    settings: ModelSettings, vocabulary: Vocabulary, length: int, seed: int, own: BertConfig | None = None
) -> Bert:
    """A new model, or the one of `model.init`.

    Args:
        settings: settings of the model.
        vocabulary: vocabulary of the rows.
        length: length of the rows.
        seed: seed of new weights.
        own: sizes of a resumed run that began with `model.init`; the model then has shapes only.

    Raises:
        ConfigError: if weights cannot be had, or have fewer tokens or positions than the rows.

    """
    key = jax.random.key(seed)
    if not settings.init:
        sizes = {"vocab_size": vocabulary.size, "max_length": length}  # as many positions as rows are long
        return Bert(BertConfig.named(settings.size, **sizes, **_changes(settings)), key=key)
    if own is not None:
        return shapes_of(replace(own, **_changes(settings)))
    model = load(Path(settings.init).expanduser(), key=key, **_changes(settings))
    check_fits(model.config, vocabulary, length, f"model.init={settings.init}")
    return model


def check_fits(config: BertConfig, vocabulary: Vocabulary, length: int, source: str) -> None:
    """Check that a model knows all tokens and positions of rows.

    Raises:
        ConfigError: if it does not.

    """
    if vocabulary.size > config.vocab_size:
        raise ConfigError(
            f"{source}: has {config.vocab_size} tokens, the tokenizer {vocabulary.size}; set data.tokenizer to the "
            "model's own"
        )
    if config.first_position and vocabulary.pad != config.padding:
        raise ConfigError(
            f"{source}: its positions begin after padding token {config.padding}, the tokenizer's is {vocabulary.pad}; "
            "set data.tokenizer to the model's own"
        )
    if length > config.max_length:
        raise ConfigError(f"data.length={length}: {source} takes rows of at most {config.max_length} tokens")


def step_of(settings: TrainSettings, model: Bert) -> TrainStep:
    """The training step.

    Raises:
        ConfigError: for settings that cannot work together or here, such as devices that do not divide the rows.

    """
    rows, devices = settings.data.batch_size // settings.accumulate, jax.device_count()
    if settings.sharding != "none" and rows % devices:
        raise ConfigError(
            f"sharding={settings.sharding}: data.batch_size / accumulate = {rows} rows for {devices} devices; expected "
            "a multiple"
        )
    return TrainStep(
        mlm_loss,
        optimizer_of(settings.optimizer, settings.steps),
        model,
        accumulate=settings.accumulate,
        precision=settings.precision,
        ema=settings.ema or None,
        layout=settings.layout,
        sharding=SHARDINGS[settings.sharding](),
        has_aux=True,
        grad_norm=True,
    )


def evaluator_of(settings: TrainSettings, held_out: HeldOut) -> Evaluator:
    """Evaluator of a run's models."""
    return Evaluator(
        held_out.rows,
        held_out.size,
        batch_size=settings.evaluation.batch_size,
        fraction=settings.data.mask_fraction,
        whole_words=settings.data.whole_words,
        precision=settings.precision,
    )


def attention_of(config: BertConfig, precision: str, packed: int = 0) -> str:
    """Name of the attention that a model in training runs; `packed` is the length of rows that hold several texts.

    Raises:
        ConfigError: for one that cannot run here.

    """
    dtype = precision_of(precision).compute or "float32"
    return chosen(config.attention, config.attention_dropout > 0, dtype, config.hidden_size // config.heads, packed)
