"""The typed configuration of a training run; every key can be overridden as `group.key=value`.

Plain dataclasses, so that a script can build a run without the command line. The type on a key's line says which values
it takes, and the comment there is what `fullstride meanflow keys` shows of it.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fullstride.device.precision import PRECISIONS
from fullstride.device.select import DEVICES
from fullstride.meanflow.config.intervals import EXPECTED, is_interval
from fullstride.meanflow.config.networks import ModelConfig, UNetConfig
from fullstride.meanflow.config.objectives import OBJECTIVES, SPLITS, TIME_LAWS, WEIGHTINGS
from fullstride.meanflow.config.optimizers import MOMENTUM
from fullstride.meanflow.config.starts import AUTO, FORMS, OWN
from fullstride.runs.trackers.tracker import TRACKERS
from fullstride.settings.fields import (
    LATER,
    AllowedNames,
    BelowOne,
    Count,
    Counts,
    Finite,
    FolderName,
    FolderPath,
    Natural,
    NotNegative,
    PartShare,
    Positive,
    Rule,
    Seed,
    Share,
)

Precision = Annotated[str, AllowedNames(PRECISIONS)]
NeverOrAboveOne = Annotated[float, Rule("0 (never), or a finite number above 1", lambda x: x == 0 or 1 < x < math.inf)]
# Millions of pixels: above the first PIL warns, above the second it refuses to decode.
MEGAPIXELS, MOST_MEGAPIXELS = 90, 178
Megapixels = Annotated[
    int,
    Rule(f"1 to {MOST_MEGAPIXELS}, as PIL decodes no larger picture", lambda x: 1 <= x <= MOST_MEGAPIXELS),
]
FEATURES = ("classifier", "efficientnet_lite0", "inception")
Features = Annotated[
    list[str],
    Rule(
        f"names out of {', '.join(FEATURES)}, none twice",
        lambda xs: set(xs) <= set(FEATURES) and len(set(xs)) == len(xs),
    ),
]


@dataclass
class DataConfig:
    """`data=digits`, `data=fashion_mnist`, ...: pictures or latents, and how batches are made of them."""

    name: str = "digits"
    path: str = ""  # file or folder; the small sets are fetched and cached without one
    batch_size: Count = 128  # samples of one forward pass; times gradient_accumulation_steps is the optimizer's
    image_size: Natural = 0  # height and width of the network's input; 0 leaves the stored size
    fit: Annotated[str, AllowedNames(("auto", "pad", "resize", "crop"))] = "auto"  # how image_size is reached
    hflip: bool = False  # mirror each picture with probability 1/2
    augment: Share = 0.0  # probability of each EDM augmentation; the CIFAR-10 recipe's is 0.12
    holdout: PartShare = 0.1  # share held out of a folder that has no test/ of its own
    latent_scale: Positive = 0.18215  # latents only: the network sees scale * z
    num_classes: Natural = 0  # latents and tensors only: labels lie below it; 0 takes one more than the largest
    workers: Natural = 2  # processes that decode what does not live on the device
    # most damaged pictures of a folder for which the next of their class stands in
    skip_damaged: Annotated[Natural, LATER] = 0
    # largest picture of a folder that is decoded, in million pixels
    max_megapixels: Annotated[Megapixels, LATER] = MEGAPIXELS
    check: Annotated[bool, LATER] = False  # read all records of a folder once before the first step
    # resume a run on image_folder with files that were added, removed or replaced
    allow_changed: Annotated[bool, LATER] = False

    @property
    def place(self) -> Path:
        """`path`, whose ~ no shell expands behind a key with a dot."""
        return Path(os.path.expanduser(self.path))


@dataclass
class LossConfig:
    """`loss=meanflow`, ...: the objective."""

    name: str = "meanflow"
    meanflow_ratio: Share = 0.25  # share of samples with r != t
    time_law: Annotated[str, AllowedNames(TIME_LAWS)] = "v0"  # how t and r are drawn
    logit_normal_mean: Finite = -0.4  # mean of logit(t)
    logit_normal_std: Positive = 1.0  # standard deviation of logit(t)
    r_logit_normal_mean: Finite = -4.0  # mean of logit(r); time_law=v1 only
    r_logit_normal_std: Positive = 1.6  # standard deviation of logit(r); time_law=v1 only
    use_batch_time: bool = False  # one (t, r) for the whole batch
    # by a sample's own error, or no less than is usual at its times
    weighting: Annotated[str, AllowedNames(WEIGHTINGS), LATER] = "adaptive"
    weighting_power: NotNegative = 1.0  # p of the weight 1 / (squared error + eps)^p
    weighting_eps: Positive = 1e-2  # keeps the weight finite as the error goes to 0
    # auto is shared, or static where that cannot be
    split: Annotated[str, AllowedNames(SPLITS)] = "auto"
    # how du/dt is taken
    jvp_backend: Annotated[str, AllowedNames(("func", "forward_ad", "two_pass", "finite_difference"))] = "func"
    jvp_chunk: Natural = 0  # most samples that are differentiated at once, to bound the memory; 0 takes all
    # of the derivative alone, with two_pass, finite_difference
    jvp_precision: Annotated[str, AllowedNames(("same", *PRECISIONS))] = "same"
    omega: Finite = 1.0  # guidance in the target: weight of the sample's own velocity
    kappa: BelowOne = 0.0  # guidance in the target: weight of the network's class-conditional velocity
    guidance_start: Share = 0.0  # smallest t with guidance
    guidance_end: Share = 1.0  # largest t with guidance
    label_dropout: Share = 0.0  # share of samples trained as 'no class'
    # velocity of the target and of the tangent: the sample's own, or that of a pretrained flow
    tangent: Annotated[str, AllowedNames(("data", "teacher")), LATER] = "data"
    teacher: Annotated[str, LATER] = ""  # folder of the pretrained run, or of one of its checkpoints
    teacher_ema: Annotated[BelowOne, LATER] = 0.0  # decay or width of the teacher's average; 0 is its run's first
    # scale of the teacher's guidance, for t in [guidance_start, guidance_end]; 1 is none
    teacher_guidance: Annotated[Finite, LATER] = 1.0
    tangent_warmup: Annotated[Share, LATER] = 0.0  # share of the run over which du/dt enters the target
    # largest root mean square of (t - r) du/dt of a sample; 0 is no limit
    tangent_limit: Annotated[NotNegative, LATER] = 0.0

    @property
    def taken_split(self) -> str:
        """The split; `auto` is the fastest that takes the derivative so."""
        if self.split != "auto":
            return self.split
        shares = (self.jvp_backend, self.jvp_chunk, self.jvp_precision) == ("func", 0, "same")
        return "shared" if shares else "static"

    @property
    def taught(self) -> bool:
        """Tell whether a pretrained flow is needed."""
        row = OBJECTIVES.get(self.name)
        return self.tangent == "teacher" or (row is not None and row.taught)

    @property
    def guided(self) -> bool:
        """Tell whether the network's own velocities enter the target."""
        return self.omega != 1 or self.kappa != 0


@dataclass
class OptimizerConfig:
    """`optimizer=adamw`, without weight decay Adam; `optimizer=muon`: Muon for matrices, AdamW for the rest."""

    name: str = "adamw"
    lr: Positive = 1e-4  # learning rate after the warm-up
    beta1: BelowOne = 0.9  # decay of the average of gradients
    beta2: BelowOne = 0.95  # decay of the average of their squares
    eps: Positive = 1e-8  # added to the root of the second average
    momentum: Annotated[BelowOne, LATER] = MOMENTUM  # of muon's average of gradients
    weight_decay: NotNegative = 0.0  # times the learning rate, of each step
    warmup_steps: Natural = 0  # the learning rate rises linearly over these
    decay: Annotated[str, AllowedNames(("constant", "cosine"))] = "constant"  # cosine: to zero at the run's end
    grad_clip: NotNegative = 0.0  # largest gradient norm; 0 leaves gradients as they are


@dataclass
class EmaConfig:
    """Exponential moving averages of the weights; sampling and evaluation use the first by default."""

    # share kept by each optimizer step
    decays: Annotated[
        list[float],
        Rule(
            "numbers in [0, 1), none twice",
            lambda xs: all(0 <= x < 1 for x in xs) and len(set(xs)) == len(xs),
        ),
    ] = field(default_factory=lambda: [0.9999])
    # relative widths of averages by power functions (EDM2), such as [0.05,0.1]
    widths: Annotated[
        list[float],
        Rule(
            "numbers above 0 and below 0.2886, none twice",
            lambda xs: all(0 < x < 0.2886 for x in xs) and len(set(xs)) == len(xs),
        ),
        LATER,
    ] = field(default_factory=list)
    period: Count = 1  # optimizer steps between updates, each of which keeps decay^period
    warmup: bool = True  # step k keeps at most (1 + k) / (10 + k), so that the initial weights fade early


@dataclass
class GuardConfig:
    """Checks and guards of a training run."""

    # a gradient longer than this many running averages is scaled to one; 0 leaves all as they are
    spike: NeverOrAboveOne = 20.0
    max_skips: Count = 10  # steps that are not finite, in a row, before the last checkpoint is restored
    max_rollbacks: Natural = 3  # restored without a new checkpoint before the run gives up
    stall_seconds: NotNegative = 600.0  # a step that takes longer has its stack printed; 0 watches nothing
    check_step: bool = True  # compare the first step's loss and gradients with eager fp32, and refuse wrong ones
    check_tangents: bool = True  # compare du/dt with fp64 before the first step, and refuse to train if it is wrong


@dataclass
class WatchConfig:
    """Limits at which a run ends itself with exit code 75, so that it can be restarted; 0 is no limit."""

    first_step_minutes: NotNegative = 60.0  # minutes until the first step: workers, compilation, checks
    step_minutes: NotNegative = 30.0  # minutes without a step
    gpu_idle_minutes: NotNegative = 15.0  # minutes between steps with nothing running on the GPU
    checkpoint_factor: NeverOrAboveOne = 2.0  # times as long without a checkpoint as its steps should take
    checkpoint_minutes: NotNegative = 10.0  # minutes without a checkpoint that are always allowed
    evaluation_minutes: NotNegative = 240.0  # minutes of one evaluation


@dataclass
class EvalConfig:
    """Scores that `eval_every` and `fullstride meanflow evaluate` compute."""

    # generated images; 0 means as many as the held-out half has
    num_samples: Annotated[int, Rule("0 (as many as were held out), or at least 4", lambda x: x == 0 or x >= 4)] = 0
    batch_size: Count = 512  # images of one forward pass
    steps: Counts = field(default_factory=lambda: [1, 2, 4])  # MeanFlow sampler steps
    # [classifier,efficientnet_lite0,inception]; of none the classifier's if the data are pictures of several classes
    features: Features = field(default_factory=list)
    inception_weights: str = ""  # file of torch-fidelity's Inception, for features=[inception]
    precision: Precision = "fp32"  # of the generating network; metrics are fp32 and fp64 in each
    # how the generating network runs; auto is graph on CUDA
    backend: Annotated[str, AllowedNames(("auto", "eager", "graph"))] = "eager"


@dataclass
class TrainConfig:
    """A whole run."""

    preset: str = ""  # the published recipe that the other settings start from
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=UNetConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    epochs: Count = 100  # passes over the training data
    gradient_accumulation_steps: Count = 1  # forward and backward passes of an optimizer step
    precision: Precision = "fp32"  # bf16 by autocast; weights, norms, loss and optimizer are fp32 in each
    channels_last: bool = False  # weights and activations of convolutions in the memory order that tensor cores want
    device: Annotated[str, AllowedNames(DEVICES)] = "auto"  # where
    # how a step runs; auto is the fastest
    backend: Annotated[str, AllowedNames(("auto", "eager", "graph", "compile", "compile+graph"))] = "eager"
    # steps, and with fsdp state, shared out over torchrun's processes
    distributed: Annotated[str, AllowedNames(("none", "ddp", "fsdp"))] = "none"
    # what gradients travel by between GPUs; auto is copies where that can be
    transfers: Annotated[str, AllowedNames(("auto", "copies", "nccl"))] = "auto"
    seed: Seed = 0  # of weights, data order, noise and times
    # weights to start from: a run, a checkpoint, or a file of another project
    init_from: Annotated[str, LATER] = ""
    # whose names those weights have; auto recognises them
    init_form: Annotated[str, AllowedNames((AUTO, OWN, *FORMS)), LATER] = AUTO
    eval_every: Natural = 0  # epochs between evaluations, the last epoch's included; 0 never evaluates
    # between checkpoints: epochs (10), steps (500steps) or minutes (10min); 0 saves at the end only
    save_every: Annotated[int | str, Rule(EXPECTED, is_interval)] = "10min"
    keep: Natural = 3  # newest checkpoints that stay; 0 keeps all
    log_every: Count = 50  # optimizer steps between lines of metrics.jsonl
    track: Annotated[str, AllowedNames(TRACKERS)] = "none"  # beside metrics.jsonl
    project: FolderName = "fullstride"  # the tracker's project
    run_name: FolderName = "default"  # name of the run's folder
    output_dir: FolderPath = "runs"  # the run lives in output_dir/run_name
    resume: bool = False  # go on from the newest checkpoint of run_name
    overwrite: bool = False  # delete an earlier run of the same name
