"""Settings of `fullstride bert train`: plain dataclasses, each key of which is an override.

The type on a key's line says which values it takes, and the comment there is what `fullstride bert keys` shows of it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fullstride.bert.model.config import ATTENTIONS, SIZES
from fullstride.errors import ConfigError
from fullstride.runs.trackers.tracker import TRACKERS
from fullstride.settings.fields import (
    AllowedNames,
    BelowOne,
    Count,
    FolderName,
    FolderPath,
    Natural,
    NotNegative,
    PartShare,
    Positive,
    Rule,
    Seed,
    check,
    walk,
)
from fullstride.settings.overrides import assign, flat, nearest, split, value_of


@dataclass
class DataSettings:
    """`data=python_docs`, `data=gcide`, `data=text_files` or `data=hf_dataset`, and how rows are made of the texts."""

    # data=NAME for short
    name: Annotated[str, AllowedNames(("python_docs", "gcide", "text_files", "hf_dataset"))] = "python_docs"
    path: str = ""  # files, a folder, or a data set's name
    # what is an entry, of text_files
    separator: Annotated[str, AllowedNames(("file", "blank_line", "line"))] = "file"
    split: str = "train"  # of hf_dataset
    column: str = "text"  # of hf_dataset
    holdout: PartShare = 0.05  # share of the entries that is held out
    tokenizer: str = ""  # minilm, or a tokenizer.json, a vocab.txt or their folder; without one it is trained
    vocab_size: int = 4096  # of a tokenizer that is trained
    lowercase: bool = True  # of a tokenizer that is trained
    # tokens of a row
    length: Annotated[int, Rule("at least 3, two of which mark the beginning and end of a text", lambda x: x >= 3)] = 64
    batch_size: Count = 32  # rows of an optimizer step
    # share of the tokens that is predicted
    mask_fraction: Annotated[float, Rule("a share above 0 and at most 0.5", lambda x: 0 < x <= 0.5)] = 0.15
    whole_words: bool = False  # words are chosen to be predicted, not tokens
    pack: bool = True  # several short texts in a row


@dataclass
class ModelSettings:
    """`model=tiny`, `mini`, `small`, `medium`, `base6`, `base` or `large`."""

    size: Annotated[str, AllowedNames(SIZES)] = "tiny"  # model=SIZE for short
    init: str = ""  # folder of weights to start from, whose sizes replace `size`
    hidden_dropout: BelowOne = 0.0  # of embeddings and of the outputs of each block
    attention_dropout: BelowOne = 0.0  # above 0 attention is eager
    attention: Annotated[str, AllowedNames(ATTENTIONS)] = "auto"  # how attention is computed


@dataclass
class OptimizerSettings:
    """AdamW (arXiv:1711.05101); biases and norms are not decayed."""

    lr: Positive = 2e-3  # learning rate after the warm-up
    beta1: BelowOne = 0.9  # decay of the average of gradients
    beta2: BelowOne = 0.98  # decay of the average of their squares
    eps: Positive = 1e-6  # added to the root of the second average
    weight_decay: NotNegative = 0.01  # times the learning rate, of each step
    warmup_steps: Natural = 100  # the learning rate rises linearly over these
    decay: Annotated[str, AllowedNames(("linear", "constant"))] = "linear"  # linear: to zero at the last step
    grad_clip: NotNegative = 1.0  # largest norm of all gradients together; 0 leaves them as they are


@dataclass
class EvaluationSettings:
    """Scores that `eval_every` and `fullstride bert evaluate` compute."""

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
    precision: Annotated[str, AllowedNames(("fp32", "bf16", "fp16"))] = "fp32"
    ema: BelowOne = 0.0  # decay of an average of the weights, which is then evaluated and exported; 0 keeps none
    layout: Annotated[str, AllowedNames(("grouped", "flat"))] = "grouped"  # how the step holds its state
    sharding: Annotated[str, AllowedNames(("none", "dp", "fsdp"))] = "none"  # over all devices
    # random numbers of dropout; rbg is faster on a GPU
    rng: Annotated[str, AllowedNames(("threefry2x32", "rbg"))] = "threefry2x32"
    device: Annotated[str, AllowedNames(("auto", "cpu", "gpu"))] = "auto"  # the command line may call a gpu cuda
    seed: Seed = 0  # of weights, order, masks and dropout
    eval_every: Natural = 400  # steps between evaluations, and one at the end; 0 never evaluates
    save_every: Natural = 400  # steps between checkpoints, and one at the end; 0 saves at the end only
    keep: Natural = 2  # newest checkpoints that stay; 0 keeps all
    log_every: Count = 50  # steps between lines of metrics.jsonl
    track: Annotated[str, AllowedNames(TRACKERS)] = "none"  # beside metrics.jsonl
    project: FolderName = "fullstride"  # the tracker's project
    run_name: FolderName = "bert"  # name of the run's folder
    output_dir: FolderPath = "runs"  # the run lives in output_dir/run_name
    resume: bool = False  # go on from the newest checkpoint of run_name
    overwrite: bool = False  # delete an earlier run of the same name


def validate(settings: TrainSettings) -> None:
    """Check every value that depends neither on the machine nor on the data.

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


# What a group alone stands for.
SHORT = {"data": "data.name", "model": "model.size"}
# Values under other names: `meanflow` and PyTorch call a GPU cuda, JAX gpu.
SAME = {("device", "cuda"): "gpu"}
ADDED = {"project", "track"}  # keys that a run of an earlier version lacks: they have their defaults
SHOWN = 5  # keys of another version that an error names


def settings_of(overrides: list[str], base: TrainSettings | None = None) -> TrainSettings:
    """The settings of a run, e.g. of `["model=mini", "data=gcide", "optimizer.lr=1e-3", "steps=5000"]`.

    Args:
        overrides: `key=value` in any order, each key at most once.
        base: settings that the overrides change in place; the defaults if None.

    Raises:
        ConfigError: as `apply`, or for a value that cannot be.

    """
    settings = base or TrainSettings()
    apply(overrides, settings)
    validate(settings)
    return settings


def apply(overrides: list[str], settings: TrainSettings) -> None:
    """Set what the overrides name; the whole is not checked yet.

    Raises:
        ConfigError: for an override without `=`, an unknown key, a key given twice, or a value of another type.

    """
    known = {key.name: key for key in walk(settings)}
    for each in split(overrides, "steps=2000", SHORT):
        if each.key not in known:
            raise ConfigError(
                f"{each.given}: no such key{nearest(each.key, [*SHORT, *known], ('optimizer', 'evaluation'))}"
            )
        text = SAME.get((each.key, each.text), each.text)
        assign(settings, each.key, value_of(each._replace(text=text), known[each.key]))


def full_key(override: str) -> str:
    """The key that an override sets, of a group alone what that stands for."""
    name = override.partition("=")[0]
    return SHORT.get(name, name)


def settings_from(values: dict[str, Any], path: Path) -> TrainSettings:
    """The settings whose `dataclasses.asdict` is `values`, as the file at `path` in a run's folder has it.

    Raises:
        ConfigError: where they are those of another version; it names the file and `SHOWN` keys at most.

    """
    settings, found = TrainSettings(), dict(flat(values))
    if strange := sorted((found.keys() ^ {key.name for key in walk(settings)}) - (ADDED - found.keys())):
        more = f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else ""
        raise ConfigError(
            f"{path} is not of this version's bert: {', '.join(strange[:SHOWN])}{more} are missing or unknown; train "
            "again under another run_name, or resume with the version that began the run"
        )
    for key, value in found.items():
        assign(settings, key, value)
    return settings
