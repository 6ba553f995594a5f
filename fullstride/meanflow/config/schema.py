"""The typed configuration of a training run; every key can be overridden as `group.key=value`.

Plain dataclasses: nothing here needs Hydra, so a script can build a run without the command line.
The comment on a key's line is what `fullstride meanflow keys` shows of it.
"""

from dataclasses import dataclass, field


@dataclass
class DataConfig:
    """`data=digits`, `data=fashion_mnist`, ...: which pictures or latents, and how a batch is made of them."""

    name: str = "digits"
    path: str = ""  # file or folder; the small sets are fetched and cached without one
    batch_size: int = 128  # samples of one forward pass; times gradient_accumulation_steps is the optimizer's
    image_size: int = 0  # height and width of the network's input; 0 leaves the stored size
    fit: str = "auto"  # auto | pad | resize | crop: how image_size is reached
    hflip: bool = False  # mirror each picture with probability 1/2
    augment: float = 0.0  # probability of each EDM augmentation; the CIFAR-10 recipe's is 0.12
    holdout: float = 0.1  # share held out of a folder that has no test/ of its own
    latent_scale: float = 0.18215  # latents only: the network sees scale * z
    num_classes: int = 0  # latents only: labels lie below it; 0 takes one more than the largest
    workers: int = 2  # processes that decode what does not live on the device
    skip_damaged: int = 0  # most damaged pictures of a folder for which the next of their class stands in
    check: bool = False  # read all records of a folder once before the first step
    allow_changed: bool = False  # resume a run on image_folder with files that were added, removed or replaced


@dataclass
class ModelConfig:
    """What every network has; each family adds its own keys."""

    name: str = ""
    class_conditional: bool = False  # the network sees labels; sampling can choose a class
    recompute: bool = False  # the blocks' activations anew in the backward pass: less memory, a forward pass more


@dataclass
class UNetConfig(ModelConfig):
    """`model=unet`: the 52M U-Net; `model=unet_tiny`: a preset for the CPU."""

    name: str = "unet"
    channels: int = 128  # width of the first level
    channel_mult: list[int] = field(default_factory=lambda: [1, 2, 3])  # width of each level in units of channels
    num_blocks: int = 3  # residual blocks a level on the way down
    attention_resolutions: list[int] = field(default_factory=lambda: [16])  # feature map sizes with attention
    dropout: float = 0.0  # in the residual blocks
    time_max_frequency: float = 64.0  # radians a unit of time


@dataclass
class SongUNetConfig(ModelConfig):
    """`model=song_unet`: the CIFAR-10 MeanFlow network, 55.9M weights."""

    name: str = "song_unet"
    channels: int = 128  # width of the first level
    channel_mult: list[int] = field(default_factory=lambda: [2, 2, 2])  # width of each level in units of channels
    num_blocks: int = 4  # residual blocks a level on the way down
    attention_resolutions: list[int] = field(default_factory=lambda: [16])  # feature map sizes with attention
    dropout: float = 0.2  # in the residual blocks


@dataclass
class DiTConfig(ModelConfig):
    """`model=dit_b4`, ..., `model=dit_xl2`: diffusion transformers."""

    name: str = "dit_b2"
    patch_size: int = 2  # side of the squares that become tokens
    width: int = 768  # features of a token
    depth: int = 12  # blocks
    heads: int = 12  # of attention
    qk_norm: bool = False  # normalize queries and keys


@dataclass
class LossConfig:
    """`loss=meanflow`; `loss=imf` and `loss=imf_ema`, along the network's or its average's velocity; `loss=mse`."""

    name: str = "meanflow"
    meanflow_ratio: float = 0.25  # share of samples with r != t
    time_law: str = "v0"  # v0 | v1 | uniform
    logit_normal_mean: float = -0.4  # mean of logit(t)
    logit_normal_std: float = 1.0  # standard deviation of logit(t)
    r_logit_normal_mean: float = -4.0  # mean of logit(r); time_law=v1 only
    r_logit_normal_std: float = 1.6  # standard deviation of logit(r); time_law=v1 only
    use_batch_time: bool = False  # one (t, r) for the whole batch
    weighting: str = "adaptive"  # adaptive | huber: by a sample's own error, or no less than is usual at its times
    weighting_power: float = 1.0  # p of the weight 1 / (squared error + eps)^p
    weighting_eps: float = 1e-2  # keeps the weight finite as the error goes to 0
    split: str = "auto"  # auto | static | shared | full | bernoulli; auto is shared, or static where that cannot be
    jvp_backend: str = "func"  # func | forward_ad | two_pass | finite_difference
    jvp_chunk: int = 0  # most samples that are differentiated at once, to bound the memory; 0 takes all
    jvp_precision: str = "same"  # same | fp32 | tf32 | bf16: of the derivative alone, with two_pass, finite_difference
    omega: float = 1.0  # guidance in the target: weight of the sample's own velocity
    kappa: float = 0.0  # guidance in the target: weight of the network's class-conditional velocity
    guidance_start: float = 0.0  # smallest t with guidance
    guidance_end: float = 1.0  # largest t with guidance
    label_dropout: float = 0.0  # share of samples trained as 'no class'


@dataclass
class OptimizerConfig:
    """`optimizer=adamw`; without weight decay it is Adam."""

    name: str = "adamw"
    lr: float = 1e-4  # learning rate after the warm-up
    beta1: float = 0.9  # decay of the average of gradients
    beta2: float = 0.95  # decay of the average of their squares
    eps: float = 1e-8  # added to the root of the second average
    weight_decay: float = 0.0  # times the learning rate, of each step
    warmup_steps: int = 0  # the learning rate rises linearly over these
    decay: str = "constant"  # constant | cosine (to zero at the run's end)
    grad_clip: float = 0.0  # largest gradient norm; 0 leaves gradients as they are


@dataclass
class EmaConfig:
    """Exponential moving averages of the weights; sampling and evaluation use the first unless told."""

    decays: list[float] = field(default_factory=lambda: [0.9999])  # share kept by each optimizer step
    period: int = 1  # optimizer steps between updates, each of which keeps decay^period
    warmup: bool = True  # step k keeps at most (1 + k) / (10 + k), so that the initial weights fade early


@dataclass
class GuardConfig:
    """What a training run does about what would harm it."""

    spike: float = 20.0  # a gradient longer than this many running averages is scaled to one; 0 leaves all as they are
    max_skips: int = 10  # steps that are not finite, in a row, before the last checkpoint is restored
    max_rollbacks: int = 3  # restored without a new checkpoint before the run gives up
    stall_seconds: float = 600.0  # a step that takes longer has its stack printed; 0 watches nothing
    check_step: bool = True  # compare the first step's loss and gradients with eager fp32, and refuse wrong ones
    check_tangents: bool = True  # compare du/dt with fp64 before the first step, and refuse to train if it is wrong


@dataclass
class WatchConfig:
    """When an attempt at a run ends itself, with exit code 75, so that it can be started again; 0 is never."""

    first_step_minutes: float = 60.0  # minutes until the first step: workers, compilation, checks
    step_minutes: float = 30.0  # minutes without a step
    gpu_idle_minutes: float = 15.0  # minutes between steps with nothing running on the GPU
    checkpoint_factor: float = 2.0  # times as long without a checkpoint as its steps should take
    checkpoint_minutes: float = 10.0  # minutes without a checkpoint that are always allowed
    evaluation_minutes: float = 240.0  # minutes of one evaluation


@dataclass
class EvalConfig:
    """What `eval_every` and `fullstride meanflow evaluate` compute."""

    num_samples: int = 0  # generated images; 0 means as many as the held-out half has
    batch_size: int = 512  # images of one forward pass
    steps: list[int] = field(default_factory=lambda: [1, 2, 4])  # MeanFlow sampler steps
    # None given: the classifier's if the data are pictures of several classes.
    features: list[str] = field(default_factory=list)  # classifier, efficientnet_lite0, inception
    inception_weights: str = ""  # file of torch-fidelity's Inception, for features=[inception]
    precision: str = "fp32"  # fp32 | tf32 | bf16: of the generating network; metrics are fp32 and fp64 in each
    backend: str = "eager"  # auto | eager | graph: how the generating network runs; auto is graph on CUDA


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
    epochs: int = 100  # passes over the training data
    gradient_accumulation_steps: int = 1  # forward and backward passes of an optimizer step
    precision: str = "fp32"  # fp32 | tf32 | bf16 (autocast); weights, norms, loss and optimizer are fp32 in each
    channels_last: bool = False  # weights and activations of convolutions in the memory order that tensor cores want
    device: str = "auto"  # auto | cpu | cuda | mps
    backend: str = "eager"  # eager | graph | compile | compile+graph | auto, the fastest: how a step runs
    distributed: str = "none"  # none | ddp | fsdp: steps, and with fsdp state, shared out over torchrun's processes
    transfers: str = "auto"  # copies | nccl | auto, copies where that can be: what gradients travel by between GPUs
    seed: int = 0  # of weights, data order, noise and times
    eval_every: int = 0  # epochs between evaluations, the last epoch's included; 0 never evaluates
    save_every: int = 0  # epochs between checkpoints; 0 saves at the end only
    keep: int = 3  # newest checkpoints that stay; 0 keeps all
    log_every: int = 50  # optimizer steps between lines of metrics.jsonl
    track: str = "none"  # none | trackio | tensorboard, beside metrics.jsonl
    project: str = "fullstride"  # the tracker's project
    run_name: str = "default"  # name of the run's folder
    output_dir: str = "runs"  # the run lives in output_dir/run_name
    resume: bool = False  # go on from the newest checkpoint of run_name
    overwrite: bool = False  # delete an earlier run of the same name
