"""What `fullstride bert train` can be told: plain dataclasses, each key of which is an override.

The comment on a key's line is what `fullstride bert keys` shows of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from fullstride.bert.model.config import ATTENTIONS, SIZES
from fullstride.errors import ConfigError, one_of
from fullstride.runs.atomic_files import is_folder_name


@dataclass
class DataSettings:
    """`data=python_docs`, `data=gcide`, `data=text_files` or `data=hf_dataset`, and what is made of the texts."""

    name: str = "python_docs"  # python_docs | gcide | text_files | hf_dataset; data=NAME for short
    path: str = ""  # files, a folder, or a data set's name
    separator: str = "file"  # file | blank_line | line: what is an entry, of text_files
    split: str = "train"  # of hf_dataset
    column: str = "text"  # of hf_dataset
    holdout: float = 0.05  # share of the entries that is held out
    tokenizer: str = ""  # minilm, or a tokenizer.json, a vocab.txt or their folder; without one it is trained
    vocab_size: int = 4096  # of a tokenizer that is trained
    lowercase: bool = True  # of a tokenizer that is trained
    length: int = 64  # tokens of a row
    batch_size: int = 32  # rows of an optimizer step
    mask_fraction: float = 0.15  # share of the tokens that is predicted
    whole_words: bool = False  # words are chosen to be predicted, not tokens
    pack: bool = True  # several short texts in a row


@dataclass
class ModelSettings:
    """`model=tiny`, `mini`, `small`, `medium`, `base6`, `base` or `large`."""

    size: str = "tiny"  # tiny | mini | small | medium | base6 | base | large; model=SIZE for short
    init: str = ""  # folder of weights to start from, whose sizes replace `size`
    hidden_dropout: float = 0.0  # of embeddings and of the outputs of each block
    attention_dropout: float = 0.0  # above 0 attention is eager
    attention: str = "auto"  # auto | cudnn | xla | eager


@dataclass
class OptimizerSettings:
    """AdamW (arXiv:1711.05101); biases and norms are not decayed."""

    lr: float = 2e-3  # learning rate after the warm-up
    beta1: float = 0.9  # decay of the average of gradients
    beta2: float = 0.98  # decay of the average of their squares
    eps: float = 1e-6  # added to the root of the second average
    weight_decay: float = 0.01  # times the learning rate, of each step
    warmup_steps: int = 100  # the learning rate rises linearly over these
    decay: str = "linear"  # linear, to zero at the last step | constant
    grad_clip: float = 1.0  # largest norm of all gradients together; 0 leaves them as they are


@dataclass
class EvaluationSettings:
    """What `eval_every` and `fullstride bert evaluate` compute."""

    size: int = 50_000  # bytes of held-out text; 0 takes all
    batch_size: int = 64  # rows of a forward pass; changes no result


@dataclass
class TrainSettings:
    """A whole run."""

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    steps: int = 1200  # optimizer steps of the whole run
    accumulate: int = 1  # forward and backward passes of a step, which share its rows
    precision: str = "fp32"  # fp32 | bf16 | fp16 (with loss scaling); weights and optimizer stay fp32
    ema: float = 0.0  # decay of an average of the weights, which is then evaluated and exported; 0 keeps none
    layout: str = "grouped"  # grouped | flat: how the step holds its state
    sharding: str = "none"  # none | dp | fsdp, over all devices
    rng: str = "threefry2x32"  # threefry2x32 | rbg, which is faster on a GPU: random numbers of dropout
    device: str = "auto"  # auto | cpu | gpu, which the command line may call cuda
    seed: int = 0  # of weights, order, masks and dropout
    eval_every: int = 400  # steps between evaluations, and one at the end; 0 never evaluates
    save_every: int = 400  # steps between checkpoints, and one at the end; 0 saves at the end only
    keep: int = 2  # newest checkpoints that stay; 0 keeps all
    log_every: int = 50  # steps between lines of metrics.jsonl
    run_name: str = "bert"  # name of the run's folder
    output_dir: str = "runs"  # the run lives in output_dir/run_name
    resume: bool = False  # go on from the newest checkpoint of run_name
    overwrite: bool = False  # delete an earlier run of the same name


NAMES: dict[str, tuple[str, ...]] = {
    "data.name": ("python_docs", "gcide", "text_files", "hf_dataset"),
    "data.separator": ("file", "blank_line", "line"),
    "model.size": tuple(SIZES),
    "model.attention": ATTENTIONS,
    "optimizer.decay": ("linear", "constant"),
    "precision": ("fp32", "bf16", "fp16"),
    "layout": ("grouped", "flat"),
    "sharding": ("none", "dp", "fsdp"),
    "rng": ("threefry2x32", "rbg"),
    "device": ("auto", "cpu", "gpu"),
}


# What the values must be, in words and as a predicate, which NaN must fail.
RULES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    (
        "at least 1",
        lambda x: x >= 1,
        ("data.batch_size", "evaluation.batch_size", "accumulate", "log_every", "steps"),
    ),
    ("at least 3, two of which begin and end a text", lambda x: x >= 3, ("data.length",)),
    ("a share above 0 and below 1", lambda x: 0 < x < 1, ("data.holdout",)),
    ("a share above 0, of at most 0.5", lambda x: 0 < x <= 0.5, ("data.mask_fraction",)),
    (
        "a number in [0, 1)",
        lambda x: 0 <= x < 1,
        ("model.hidden_dropout", "model.attention_dropout", "optimizer.beta1", "optimizer.beta2", "ema"),
    ),
    ("a finite number above 0", lambda x: 0 < x < math.inf, ("optimizer.lr", "optimizer.eps")),
    (
        "a finite number, at least 0",
        lambda x: 0 <= x < math.inf,
        (
            "optimizer.weight_decay", "optimizer.warmup_steps", "optimizer.grad_clip", "evaluation.size", "eval_every",
            "save_every", "keep",
        ),
    ),
    ("a number from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32, ("seed",)),
    ("a folder's name, without / \\ or ..", is_folder_name, ("run_name",)),
    ("a folder's path; . for this one", lambda x: bool(x.strip()), ("output_dir",)),
)  # fmt: skip


def validate(settings: TrainSettings) -> None:
    """Check every value that is wrong whatever the machine and the data.

    Raises:
        ConfigError: for the first impossible value: its key, what was received, what is expected.

    """
    for key, names in NAMES.items():
        one_of(key, attrgetter(key)(settings), names)
    for expected, holds, keys in RULES:
        for key in keys:
            if not holds(value := attrgetter(key)(settings)):
                raise ConfigError(f"{key}={value}: expected {expected}")
    if settings.data.batch_size % settings.accumulate:
        raise ConfigError(
            f"accumulate={settings.accumulate}: expected a divisor of data.batch_size={settings.data.batch_size}"
        )
    if settings.optimizer.decay == "linear" and settings.optimizer.warmup_steps >= settings.steps:
        raise ConfigError(
            f"optimizer.warmup_steps={settings.optimizer.warmup_steps}: expected fewer than steps={settings.steps}"
        )
