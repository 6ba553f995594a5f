"""What `fullstride bert train` can be told: plain dataclasses, each key of which is an override.

The type on a key's line says which values it takes, and the comment there is what `fullstride bert keys` shows of it.
"""

from dataclasses import dataclass, field
from typing import Annotated

from fullstride.bert.model.config import ATTENTIONS, SIZES
from fullstride.errors import ConfigError
from fullstride.settings.fields import (
    BelowOne,
    Count,
    FolderName,
    FolderPath,
    Names,
    Natural,
    NotNegative,
    PartShare,
    Positive,
    Rule,
    Seed,
    check,
)


@dataclass
class DataSettings:
    """`data=python_docs`, `data=gcide`, `data=text_files` or `data=hf_dataset`, and what is made of the texts."""

    # data=NAME for short
    name: Annotated[str, Names(("python_docs", "gcide", "text_files", "hf_dataset"))] = "python_docs"
    path: str = ""  # files, a folder, or a data set's name
    # what is an entry, of text_files
    separator: Annotated[str, Names(("file", "blank_line", "line"))] = "file"
    split: str = "train"  # of hf_dataset
    column: str = "text"  # of hf_dataset
    holdout: PartShare = 0.05  # share of the entries that is held out
    tokenizer: str = ""  # minilm, or a tokenizer.json, a vocab.txt or their folder; without one it is trained
    vocab_size: int = 4096  # of a tokenizer that is trained
    lowercase: bool = True  # of a tokenizer that is trained
    # tokens of a row
    length: Annotated[int, Rule("at least 3, two of which begin and end a text", lambda x: x >= 3)] = 64
    batch_size: Count = 32  # rows of an optimizer step
    # share of the tokens that is predicted
    mask_fraction: Annotated[float, Rule("a share above 0, of at most 0.5", lambda x: 0 < x <= 0.5)] = 0.15
    whole_words: bool = False  # words are chosen to be predicted, not tokens
    pack: bool = True  # several short texts in a row


@dataclass
class ModelSettings:
    """`model=tiny`, `mini`, `small`, `medium`, `base6`, `base` or `large`."""

    size: Annotated[str, Names(SIZES)] = "tiny"  # model=SIZE for short
    init: str = ""  # folder of weights to start from, whose sizes replace `size`
    hidden_dropout: BelowOne = 0.0  # of embeddings and of the outputs of each block
    attention_dropout: BelowOne = 0.0  # above 0 attention is eager
    attention: Annotated[str, Names(ATTENTIONS)] = "auto"  # how attention is computed


@dataclass
class OptimizerSettings:
    """AdamW (arXiv:1711.05101); biases and norms are not decayed."""

    lr: Positive = 2e-3  # learning rate after the warm-up
    beta1: BelowOne = 0.9  # decay of the average of gradients
    beta2: BelowOne = 0.98  # decay of the average of their squares
    eps: Positive = 1e-6  # added to the root of the second average
    weight_decay: NotNegative = 0.01  # times the learning rate, of each step
    warmup_steps: Natural = 100  # the learning rate rises linearly over these
    decay: Annotated[str, Names(("linear", "constant"))] = "linear"  # linear: to zero at the last step
    grad_clip: NotNegative = 1.0  # largest norm of all gradients together; 0 leaves them as they are


@dataclass
class EvaluationSettings:
    """What `eval_every` and `fullstride bert evaluate` compute."""

    size: Natural = 50_000  # bytes of held-out text; 0 takes all
    batch_size: Count = 64  # rows of a forward pass; changes no result


@dataclass
class TrainSettings:
    """A whole run."""

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    steps: Count = 1200  # optimizer steps of the whole run
    accumulate: Count = 1  # forward and backward passes of a step, which share its rows
    # fp16 with loss scaling; weights and optimizer stay fp32
    precision: Annotated[str, Names(("fp32", "bf16", "fp16"))] = "fp32"
    ema: BelowOne = 0.0  # decay of an average of the weights, which is then evaluated and exported; 0 keeps none
    layout: Annotated[str, Names(("grouped", "flat"))] = "grouped"  # how the step holds its state
    sharding: Annotated[str, Names(("none", "dp", "fsdp"))] = "none"  # over all devices
    # random numbers of dropout; rbg is faster on a GPU
    rng: Annotated[str, Names(("threefry2x32", "rbg"))] = "threefry2x32"
    device: Annotated[str, Names(("auto", "cpu", "gpu"))] = "auto"  # the command line may call a gpu cuda
    seed: Seed = 0  # of weights, order, masks and dropout
    eval_every: Natural = 400  # steps between evaluations, and one at the end; 0 never evaluates
    save_every: Natural = 400  # steps between checkpoints, and one at the end; 0 saves at the end only
    keep: Natural = 2  # newest checkpoints that stay; 0 keeps all
    log_every: Count = 50  # steps between lines of metrics.jsonl
    run_name: FolderName = "bert"  # name of the run's folder
    output_dir: FolderPath = "runs"  # the run lives in output_dir/run_name
    resume: bool = False  # go on from the newest checkpoint of run_name
    overwrite: bool = False  # delete an earlier run of the same name


def validate(settings: TrainSettings) -> None:
    """Check every value that is wrong whatever the machine and the data.

    Raises:
        ConfigError: for the first impossible value: its key, what was received, what is expected.

    """
    check(settings)
    if settings.data.batch_size % settings.accumulate:
        raise ConfigError(
            f"accumulate={settings.accumulate}: expected a divisor of data.batch_size={settings.data.batch_size}"
        )
    if settings.optimizer.decay == "linear" and settings.optimizer.warmup_steps >= settings.steps:
        raise ConfigError(
            f"optimizer.warmup_steps={settings.optimizer.warmup_steps}: expected fewer than steps={settings.steps}"
        )
