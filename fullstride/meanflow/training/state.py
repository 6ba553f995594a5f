"""Everything that a run needs to resume exactly: weights, averages, optimizer, random number generators, position."""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import Tensors, ema_group, read_group, read_manifest, write_checkpoint
from fullstride.meanflow.config.presets import chosen
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.dataset import Dataset
from fullstride.meanflow.data.sources.known_files import KnownFiles, changed_files, check_comparable, known_files
from fullstride.meanflow.objective.loss import SAME_LOSS
from fullstride.meanflow.training.guard import Guard
from fullstride.meanflow.training.optimizers import load_optimizer, optimizer_tensors
from fullstride.runs.atomic_files import note
from fullstride.runs.folder import FREE, refuse, setting_changes
from fullstride.step.torch import SINGLE, Averages, Pace, Processes, Shards


def stream_tensors(generator: torch.Generator) -> Tensors:
    """The states of the run's generator and of PyTorch's own."""
    tensors = {"generator": generator.get_state(), "cpu": torch.get_rng_state()}
    if generator.device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(generator.device)
    return tensors


def load_streams(generator: torch.Generator, tensors: Tensors) -> None:
    """Return to states that `stream_tensors` gave.

    Raises:
        ConfigError: if they are another device's.

    """
    if ("cuda" in tensors) != (generator.device.type == "cuda"):
        kind = "CUDA" if "cuda" in tensors else "no CUDA"
        raise ConfigError(
            f"the checkpoint was made with {kind} device, but the device is {generator.device}: their random numbers "
            "differ; resume on the device it was made on, or use another run_name"
        )
    generator.set_state(tensors["generator"])
    torch.set_rng_state(tensors["cpu"])
    if generator.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], generator.device)


def merge_ranks(processes: list[Tensors]) -> Tensors:
    """Every process's states by name, the first one's under their plain names."""
    return {_prefix(rank) + name: x for rank, tensors in enumerate(processes) for name, x in tensors.items()}


def for_rank(tensors: Tensors, rank: int) -> Tensors:
    """One process's states out of `together`."""
    split = {name: name.rpartition(".") for name in tensors}
    return {leaf: tensors[name] for name, (group, dot, leaf) in split.items() if group + dot == _prefix(rank)}


def _prefix(rank: int) -> str:
    return f"{rank}." if rank else ""


# What may differ between a run and its continuation, besides what may in every workload: how long, how a step runs;
# never what is learned, but for rounding and the units that dropout takes.
FREE_KEYS = FREE | {
    "backend", "channels_last", "data.allow_changed", "data.check", "data.max_megapixels", "data.skip_damaged",
    "data.workers", "distributed", "epochs", "guard.check_step", "guard.check_tangents", "guard.max_rollbacks",
    "guard.stall_seconds", "loss.teacher", "model.recompute", "preset", "transfers", "watch",
}  # fmt: skip


@dataclass
class Position:
    """Position in the run: `step` optimizer steps in all, `batch` of them in epoch `epoch`.

    `attempt` counts restored checkpoints: each continues with other random numbers and another order.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class DataFacts:
    """Facts about the data in a checkpoint: enough to sample without the data, and to recognise them."""

    image_shape: tuple[int, ...]
    num_classes: int
    pixels: bool
    fingerprint: str
    condition_shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, data: Dataset) -> "DataFacts":
        """The facts of a data set."""
        return cls(**{field.name: getattr(data, field.name) for field in fields(cls)})

    @classmethod
    def read(cls, manifest: dict[str, Any]) -> "DataFacts":
        """The facts in a checkpoint's manifest."""
        facts = manifest["data"]
        shapes = {key: tuple(facts.get(key, ())) for key in ("image_shape", "condition_shape")}
        return cls(**facts | shapes)


@dataclass
class RunState:
    """The live objects of a run; `save` and `restore` are each other's inverse, and collective.

    Of several processes each has all of it, or with `shards` a part of the optimizer's state and of the averages; only
    their random numbers differ. A checkpoint is complete for any number of processes that write or read it.
    """

    model: nn.Module
    ema: Averages
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    guard: Guard
    position: Position
    data: DataFacts
    files: bytes = b""
    processes: Processes = field(default_factory=lambda: SINGLE)
    shards: Shards | None = None

    def save(self, folder: Path, config: TrainConfig) -> Path:
        """Write a checkpoint of the present moment and return its folder; of several processes the first one writes.

        Raises:
            OSError: if it cannot be written; earlier ones are untouched.
            PeerError: on the other processes, if the first one cannot write.

        """
        groups = {
            "model": dict(self.model.state_dict()),
            "optimizer": optimizer_tensors(self.optimizer) if self.shards is None else self.shards.optimizer_tensors(),
            "rng": merge_ranks(self.processes.gather(stream_tensors(self.generator))),
            "guard": self.guard.tensors,
            **{ema_group(decay): self._average(decay) for decay in self.ema.models},
        }
        harmful = int(self.guard.tensors["skipped_in_a_row"])
        manifest = {
            "harmful": harmful,
            "processes": self.processes.size,
            "position": asdict(self.position),
            "data": asdict(self.data),
            "config": asdict(config),
        }
        return self.processes.led(lambda: write_checkpoint(folder, self.position.step, groups, manifest))

    def _average(self, decay: Pace) -> Tensors:
        with self.ema.whole(decay) as model:
            if self.shards is None:
                return dict(model.state_dict())
            # One at a time: all of them need not fit on a device at once.
            return {k: v.to("cpu", copy=True) for k, v in model.state_dict().items()} if self.processes.leads else {}

    def restore(self, checkpoint: Path, config: TrainConfig) -> None:
        """Return to the moment of a checkpoint; with another number of processes, random numbers begin anew from there.

        Raises:
            ConfigError: if the checkpoint is damaged or belongs to another configuration or other data.

        """
        manifest = read_manifest(checkpoint)
        refuse(checkpoint, changed_settings(manifest["config"], asdict(config)))
        self._check_data(checkpoint, DataFacts.read(manifest), allowed=config.data.allow_changed)
        self.model.load_state_dict(read_group(checkpoint, "model"))
        for decay in self.ema.models:
            self.ema.load(decay, read_group(checkpoint, ema_group(decay)))
        optimizer = read_group(checkpoint, "optimizer")
        if self.shards is None:
            load_optimizer(self.optimizer, optimizer)
        else:
            self.shards.load_optimizer(optimizer)
        self.guard.load(read_group(checkpoint, "guard"))
        self.position = Position(**manifest["position"])
        before, size = manifest.get("processes", 1), self.processes.size
        if before == size:
            load_streams(self.generator, for_rank(read_group(checkpoint, "rng"), self.processes.rank))
            return
        self.reseed(config.seed)
        if self.processes.leads:
            note(
                f"{checkpoint} was made by {before} processes; with {size}, other random numbers are used from here on"
            )

    def _check_data(self, checkpoint: Path, saved: DataFacts, *, allowed: bool) -> None:
        """Refuse other data than the checkpoint's, unless only files changed and may."""
        if saved == self.data or not self.files or replace(saved, fingerprint="") != replace(self.data, fingerprint=""):
            refuse(checkpoint, setting_changes(asdict(saved), asdict(self.data), set()), "data")
            return
        before, after = known_files(checkpoint.parents[1]), KnownFiles.unpacked(self.files)
        changed = changed_files(before, after)
        if not allowed:
            raise ConfigError(
                f"{checkpoint}: cannot resume with other data: {changed}; restore the files, or accept them as "
                "they are with data.allow_changed=true"
            )
        check_comparable(before, after)
        if self.processes.leads:
            note(f"data.allow_changed=true: since the run began, {changed}; epochs are drawn from the present files")

    def reseed(self, seed: int) -> None:
        """Other random numbers from here on, the same for the same seed, attempt, step and process."""
        numbers = (seed, self.position.attempt, self.position.step, self.processes.rank, self.processes.size)
        # In all of its bits each of them counts: on the CPU only the low 32 do.
        own = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) % 2**63
        self.generator.manual_seed(own)
        torch.manual_seed(own)


def changed_settings(saved: dict[str, Any], wanted: dict[str, Any]) -> dict[str, str]:
    """The keys by which a run of `saved` cannot continue with `wanted`, as `fullstride.runs.folder.changes`.

    A key that was not there yet when it was saved had its default.
    """
    # Of the wanted ones: a checkpoint's names are not imported, and other names are a difference themselves.
    old = _over(asdict(chosen({group: wanted[group]["name"] for group in ("model", "loss")})), saved)
    if {old["loss"].get("split"), wanted["loss"].get("split")} <= set(SAME_LOSS):
        old["loss"]["split"] = wanted["loss"].get("split")
    if "auto" in (old.get("device"), wanted.get("device")):
        old["device"] = wanted["device"]  # the random numbers tell whether it is another
    return setting_changes(old, wanted, FREE_KEYS)


def _over(usual: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Nested settings on top of others."""
    return usual | {key: _over(usual.get(key, {}), x) if isinstance(x, dict) else x for key, x in saved.items()}
