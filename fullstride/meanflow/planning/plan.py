"""Predicted cost of a run: a configuration's step, memory and times, on one or several GPUs of a machine."""

from dataclasses import dataclass, replace

from fullstride.errors import ConfigError
from fullstride.meanflow.config.datasets import row_of
from fullstride.meanflow.config.intervals import save_interval
from fullstride.meanflow.config.losses import TeacherPathConfig
from fullstride.meanflow.config.schema import LossConfig, TrainConfig
from fullstride.meanflow.data.catalogue import check_padded, load_data
from fullstride.meanflow.objective.loss import loss_of
from fullstride.meanflow.planning.cost import Costs, NetworkWork, PlannedStep, Rates, all_reduce_ms, memory_bytes, parts
from fullstride.meanflow.planning.work import count_work
from fullstride.meanflow.training.batch_share import check_parts
from fullstride.meanflow.training.build import steps_per_epoch, steps_to_checkpoint
from fullstride.meanflow.training.state import Position


@dataclass(frozen=True)
class Machine:
    """Machine that a plan is made for.

    Attributes:
        rates: rates by precision; absent if the precision was not measured.
        memory: memory of one GPU, in bytes.
        gpus: number of GPUs that share each step.
        link: bytes a second that a GPU sends and receives at once; 0 if there is one GPU.

    Raises:
        ConfigError: if GPUs are to share a step and the link is not known.

    """

    rates: dict[str, Rates]
    memory: int
    gpus: int = 1
    link: float = 0.0

    def __post_init__(self) -> None:
        """Check the link."""
        if self.gpus > 1 and self.link <= 0:
            raise ConfigError(
                f"--gpus {self.gpus}: all-reduce time depends on the link bandwidth, which no stored result "
                "contains; measure it and pass --link-gbs"
            )


@dataclass(frozen=True)
class RunPlan:
    """A prediction.

    Attributes:
        config: the run's configuration.
        work: the work of its network.
        step: the step of one GPU.
        gpus: number of GPUs that share it.
        parts: milliseconds of one optimizer step on one GPU, by kind of work.
        reduce_ms: milliseconds of the all-reduce of gradients, if nothing else ran.
        memory: peak memory of one GPU, in bytes.
        steps: optimizer steps of the run.
        epoch_steps: optimizer steps of an epoch.

    """

    config: TrainConfig
    work: NetworkWork
    step: PlannedStep
    gpus: int
    parts: dict[str, float]
    reduce_ms: float
    memory: float
    steps: int
    epoch_steps: int

    @property
    def ms(self) -> float:
        """Milliseconds of an optimizer step; the all-reduce of gradients is not hidden behind the backward pass."""
        return sum(self.parts.values()) + self.reduce_ms

    @property
    def images_a_second(self) -> float:
        """Images trained on per second, over all GPUs."""
        return self.step.batch * self.step.accumulate * self.gpus / self.ms * 1e3

    @property
    def seconds(self) -> float:
        """Seconds of all steps, without evaluations and checkpoints."""
        return self.seconds_of(self.steps)

    @property
    def epoch_seconds(self) -> float:
        """Seconds of an epoch's steps."""
        return self.seconds_of(self.epoch_steps)

    @property
    def first_save_seconds(self) -> float:
        """Seconds of the steps before the first checkpoint: that of `save_every`, or the run's last."""
        seconds = self.seconds_of(min(self.steps, steps_to_checkpoint(self.config, Position(), self.epoch_steps)))
        minutes = save_interval(self.config.save_every).minutes
        return min(seconds, 60 * minutes) if minutes else seconds

    def seconds_of(self, steps: int) -> float:
        """Seconds of that many steps."""
        return self.ms * steps / 1e3


def data_of(config: TrainConfig, records: int | None) -> tuple[int, tuple[int, ...], int]:
    """Records, shape and classes of a configuration's data; what is not known of them is read.

    Raises:
        ConfigError: for data that do not come in the size; where they are read, as `load_data`.

    """
    row = row_of(config.data.name)
    # The records of a row are ImageNet's, of a path what lies there.
    if not row.records or (row.folder and config.data.path):
        data = load_data(config.data)
        if data.condition_shape:
            raise ConfigError(
                f"data={config.data.name}: its samples have conditions, expected none; they are not planned"
            )
        return records or len(data.train), data.image_shape, data.num_classes
    (c, h, w), size = row.image_shape, config.data.image_size
    if not row.resizable and size not in (0, h):
        raise ConfigError(f"data.image_size={size}: data={config.data.name} cannot be resized; leave it out")
    if size and config.data.fit in ("auto", "pad"):
        check_padded(h, w, size)
    return records or row.records, (c, size, size) if size else (c, h, w), config.data.num_classes or row.num_classes


def passes_without_gradient(loss: LossConfig) -> float:
    """Forward passes of guidance, teacher and objective in addition to the step's own, in units of the batch."""
    guidance = (1 if loss.kappa == 0 else 2) if loss.guided and loss.label_dropout > 0 else 0
    if isinstance(loss, TeacherPathConfig):
        return 2 * loss.path_steps / loss.path_pairs * (1 if loss.teacher_guidance == 1 else 2)
    guidance += getattr(loss_of(loss), "passes_of_all", 0) if loss.label_dropout > 0 else 0
    guidance += (1 if loss.teacher_guidance == 1 else 2) if loss.tangent == "teacher" else 0
    return guidance + loss_of(loss).more_passes * derived_share(loss)


def derived_share(loss: LossConfig) -> float:
    """Share of the samples that a step takes the derivative of, in a way whose steps were measured.

    Raises:
        ConfigError: for another way.

    """
    split, ratio = loss.taken_split, loss.meanflow_ratio
    if ratio == 0:
        return 0.0
    if loss.jvp_backend != "func" or loss.jvp_chunk:
        raise ConfigError(
            f"loss.jvp_backend={loss.jvp_backend} loss.jvp_chunk={loss.jvp_chunk}: expected func and 0; other "
            "derivatives take up to twice as long and cannot be planned"
        )
    if split == "static" and ratio < 1:
        raise ConfigError(
            "loss.split=static: expected auto, shared, full or bernoulli; a network that runs twice cannot be planned"
        )
    # These two differentiate the samples with r = t, too.
    return 1.0 if split in ("full", "bernoulli") else ratio


def make_plan(
    config: TrainConfig, machine: Machine, costs: Costs, steps: int | None = None, records: int | None = None
) -> RunPlan:
    """Predict a run.

    Args:
        config: the configuration of `fullstride meanflow train`; all steps are planned as captured ones.
        machine: the machine.
        costs: fitted factors.
        steps: optimizer steps; None takes the configuration's epochs.
        records: number of training records; None takes the known number.

    Raises:
        ConfigError: if the data, the precision, the way of the derivative or the batch allow no plan, or training
            would refuse to share the batch out.

    """
    if config.optimizer.name != "adamw":
        raise ConfigError(
            f"optimizer={config.optimizer.name}: expected adamw; steps of other optimizers were not measured"
        )
    count, shape, classes = data_of(config, records)
    epoch_steps = steps_per_epoch(config, count)
    if machine.gpus > 1:
        shared = replace(config, distributed="ddp") if config.distributed == "none" else config
        check_parts(shared, machine.gpus, config.device)
    step = PlannedStep(
        batch=config.data.batch_size // machine.gpus,
        ratio=derived_share(config.loss),
        precision=config.precision,
        backend="graph" if config.backend == "graph" else "compile+graph",
        whole=True,
        averages=len(config.ema.decays) + len(config.ema.widths),
        period=config.ema.period,
        accumulate=config.gradient_accumulation_steps,
        guidance=passes_without_gradient(config.loss),
    )
    if step.precision not in machine.rates:
        raise ConfigError(
            f"precision={step.precision}: the machine has measured rates for {', '.join(machine.rates)} only"
        )
    work = count_work(config.model, shape, classes, half=step.precision == "bf16")
    reduced = all_reduce_ms(work.parameters, machine.gpus, machine.link) if machine.gpus > 1 else 0.0
    return RunPlan(
        config,
        work,
        step,
        machine.gpus,
        parts(work, step, machine.rates[step.precision], costs),
        reduced,
        memory_bytes(work, step, costs),
        steps or config.epochs * epoch_steps,
        epoch_steps,
    )


def largest_batch(plan: RunPlan, memory: int, costs: Costs) -> int:
    """The largest power of two of samples whose step fits the memory; 0 if not one does."""
    batch = 1
    while memory_bytes(plan.work, replace(plan.step, batch=batch), costs) <= memory:
        batch *= 2
    return batch // 2
