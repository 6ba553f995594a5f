"""The typed configuration of a training run; every key can be overridden as `group.key=value`.

Plain dataclasses: nothing here needs Hydra, so a script can build a run without the command line.
"""

from dataclasses import dataclass, field, is_dataclass
from typing import Any


@dataclass
class DataConfig:
    """`data=digits`: scikit-learn's 1,797 handwritten digits, 8x8 grey, in two fixed halves."""

    name: str = "digits"
    batch_size: int = 128  # samples of one forward pass; times gradient_accumulation_steps is the optimizer's


@dataclass
class ModelConfig:
    """`model=unet`: the 52M U-Net; `model=unet_tiny`: a preset for the CPU."""

    name: str = "unet"
    channels: int = 128
    channel_mult: list[int] = field(default_factory=lambda: [1, 2, 3])
    num_blocks: int = 3
    attention_resolutions: list[int] = field(default_factory=lambda: [16])
    dropout: float = 0.0
    time_max_frequency: float = 64.0  # radians a unit of time
    class_conditional: bool = False


@dataclass
class LossConfig:
    """`loss=meanflow`, or `loss=mse`, which is flow matching: no JVP, every weight 1."""

    name: str = "meanflow"
    meanflow_ratio: float = 0.25  # share of samples with r != t
    time_law: str = "v0"  # v0 | v1 | uniform
    logit_normal_mean: float = -0.4
    logit_normal_std: float = 1.0
    r_logit_normal_mean: float = -4.0  # time_law=v1 only
    r_logit_normal_std: float = 1.6  # time_law=v1 only
    use_batch_time: bool = False  # one (t, r) for the whole batch
    weighting_power: float = 1.0
    weighting_eps: float = 1e-2
    split: str = "static"  # static | bernoulli
    jvp_backend: str = "func"  # func | forward_ad | two_pass | finite_difference


@dataclass
class OptimizerConfig:
    """`optimizer=adamw`."""

    name: str = "adamw"
    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0  # the learning rate rises linearly over these
    decay: str = "constant"  # constant | cosine (to zero at the run's end)
    grad_clip: float = 0.0  # largest gradient norm; 0 leaves gradients as they are


@dataclass
class EmaConfig:
    """Exponential moving average of the weights, the ones that sampling and evaluation use."""

    decay: float = 0.9999
    period: int = 1  # optimizer steps between updates


@dataclass
class EvalConfig:
    """What `eval_every` and `fullstride meanflow evaluate` compute."""

    num_samples: int = 0  # generated images; 0 means as many as the held-out half has
    batch_size: int = 512
    steps: list[int] = field(default_factory=lambda: [1, 2, 4])  # MeanFlow sampler steps


@dataclass
class TrainConfig:
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    epochs: int = 100
    gradient_accumulation_steps: int = 1
    precision: str = "fp32"  # fp32 | tf32 | bf16 (autocast); weights, loss and optimizer are fp32 in each
    device: str = "auto"  # auto | cpu | cuda | mps
    seed: int = 0
    eval_every: int = 0  # epochs between evaluations; 0 evaluates at the end only
    save_every: int = 0  # epochs between checkpoints; 0 saves at the end only
    log_every: int = 50  # optimizer steps between lines of metrics.jsonl
    run_name: str = "default"
    output_dir: str = "runs"  # the run lives in output_dir/run_name
    resume: bool = False  # go on from the newest checkpoint of run_name
    overwrite: bool = False  # delete an earlier run of the same name


def config_from_dict(values: dict[str, Any]) -> TrainConfig:
    """The configuration whose `dataclasses.asdict` is `values`, as checkpoints store it."""
    config = TrainConfig()
    for key, value in values.items():
        group = getattr(config, key)
        setattr(config, key, type(group)(**value) if is_dataclass(group) else value)
    return config
