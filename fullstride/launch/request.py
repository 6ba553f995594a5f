"""Requests for a machine: one class of options for each backend.

A field's annotation holds its help on the command line, and what stands there for its value.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fullstride.errors import ConfigError


@dataclass(frozen=True)
class LaunchPlan:
    """Launch before it happens: the text of what would be submitted, and a function that submits it."""

    text: str
    submit: Callable[[], int]


HOURS = "Hours of an attempt; 0 means no limit."


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of every backend.

    Raises:
        ConfigError: for an invalid value.

    """

    backend: ClassVar[str]
    heading: ClassVar[str] = "Job"
    name: Annotated[str, "Name of the job: lower-case letters, digits and -."] = "fullstride"
    retries: Annotated[int, "Number of attempts after the first."] = 5
    retry_delay: Annotated[float | None, "Seconds before each; 30 by default, none if torchrun makes them."] = None
    time: Annotated[float, HOURS] = 12.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", self.name):
            raise ConfigError(f"--name {self.name}: expected lower-case letters, digits and -, beginning with a letter")
        for option in ("processes", "nodes", "cpus"):
            if (value := getattr(self, option, None)) is not None and value < 1:
                raise ConfigError(f"--{option} {value}: expected at least 1")
        for option in ("retries", "retry_delay", "time", "gpus", "memory"):
            if (value := getattr(self, option, None)) is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"--{option.replace('_', '-')} {value}: expected a finite number, at least 0")
        if self.retry_delay is not None and self.by_torchrun:
            raise ConfigError(
                f"--retry-delay {self.retry_delay:g}: launch {self.backend} of {self.all_processes} processes "
                "has no such option: torchrun starts them anew at once; leave it out"
            )

    @property
    def all_processes(self) -> int:
        """Processes that share the command, on all machines together."""
        return 1

    @property
    def by_torchrun(self) -> bool:
        """Tell whether torchrun makes the attempts after the first: those of several processes."""
        return self.all_processes > 1

    @property
    def delay(self) -> float:
        """Seconds before each attempt after the first."""
        return 30.0 if self.retry_delay is None else self.retry_delay

    @property
    def own_retries(self) -> int:
        """Attempts after the first that torchrun does not make."""
        return 0 if self.by_torchrun else self.retries

    @property
    def seconds(self) -> float:
        """Seconds of one attempt; 0 is without a limit."""
        return 3600 * self.time


@dataclass(frozen=True, kw_only=True)
class LocalRequest(Request):
    """Run a command as a process of this machine."""

    backend = "local"
    time: Annotated[float, HOURS] = 0.0


@dataclass(frozen=True, kw_only=True)
class TorchrunRequest(LocalRequest):
    """Run a command as several processes of this machine, by torchrun."""

    backend = "torchrun"
    heading = "Processes"
    processes: Annotated[int, "Number of processes."] = 1

    @property
    def all_processes(self) -> int:
        """Processes that share the command."""
        return self.processes


@dataclass(frozen=True, kw_only=True)
class MachineRequest(Request):
    """Options of every backend that lends machines."""

    heading = "Machines"
    gpus: Annotated[int, "GPUs of each machine, one process each."] = 1
    gpu: Annotated[str | None, "Kind of GPU, such as H100, as the backend calls it.", "KIND"] = None
    cpus: Annotated[int | None, "CPU cores of each machine."] = None
    memory: Annotated[float | None, "Memory of each machine, in GiB."] = None

    @property
    def processes_each(self) -> int:
        """Processes of each machine."""
        return self.gpus or 1

    @property
    def all_processes(self) -> int:
        """Processes that share the command, on all machines together."""
        return self.processes_each * getattr(self, "nodes", 1)


@dataclass(frozen=True, kw_only=True)
class SlurmRequest(MachineRequest):
    """Run a command as a job of Slurm, by submitit; a job array for a sweep."""

    backend = "slurm"
    heading = "Slurm"
    nodes: Annotated[int, "Machines."] = 1
    processes: Annotated[int | None, "Processes of each machine without GPUs (--gpus 0)."] = None
    partition: Annotated[str | None, "Partition in which the job queues."] = None
    account: Annotated[str | None, "Account that the job is charged to."] = None
    qos: Annotated[str | None, "Quality of service."] = None
    constraint: Annotated[str | None, "Features that the machines must have."] = None
    sbatch: Annotated[tuple[str, ...], "Further flag of sbatch; may be repeated.", "KEY=VALUE"] = ()
    setup: Annotated[tuple[str, ...], "Shell command to run beforehand; may be repeated.", "LINE"] = ()
    cluster: Annotated[str, "local runs jobs on this machine, by submitit.", "slurm|local"] = "slurm"
    folder: Annotated[str, "Folder for job files."] = "runs/launch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processes and self.gpus:
            raise ConfigError(
                f"--processes {self.processes}: expected --gpus 0 with it, since each GPU has one process"
            )

    @property
    def processes_each(self) -> int:
        """Processes of each machine."""
        return self.gpus or self.processes or 1

    @property
    def is_submitted(self) -> bool:
        """Tell whether Slurm runs the job, and not this machine."""
        return self.cluster == "slurm"


@dataclass(frozen=True, kw_only=True)
class ModalRequest(MachineRequest):
    """Run a command in a container of Modal; an app for each run of a sweep."""

    backend = "modal"
    heading = "Modal"
    image: Annotated[str | None, "Container image of a registry; by default Debian with Python."] = None
    pip: Annotated[tuple[str, ...], "Additional package to install; may be repeated.", "PACKAGE"] = ()
    volume: Annotated[tuple[str, ...], "Additional volume to mount; may be repeated.", "NAME:/PATH"] = ()
    runs: Annotated[str, "Volume of runs."] = "fullstride-runs"
    secret: Annotated[tuple[str, ...], "One of Modal's secrets; may be repeated.", "NAME"] = ()
    detach: Annotated[bool, "Keep running when this command ends, or wait for the run."] = True

    @property
    def by_torchrun(self) -> bool:
        """Tell that Modal makes the attempts after the first."""
        return False


@dataclass(frozen=True, kw_only=True)
class SkyPilotRequest(MachineRequest):
    """Write a task for `sky jobs launch`; one for each run of a sweep."""

    backend = "skypilot"
    heading = "SkyPilot"
    nodes: Annotated[int, "Machines."] = 1
    spot: Annotated[bool | None, "Use machines that may be preempted."] = None
    image: Annotated[str | None, "Container image of a registry."] = None
    pip: Annotated[tuple[str, ...], "Additional package to install; may be repeated.", "PACKAGE"] = ()
    setup: Annotated[tuple[str, ...], "Shell command to run beforehand; may be repeated.", "LINE"] = ()
    runs: Annotated[str, "Bucket of runs."] = "fullstride-runs"
    folder: Annotated[str, "Folder for the tasks."] = "runs/launch"


# By the backend's name, its options and the module whose `plan` takes them.
LAUNCHERS: dict[str, tuple[type[Request], str]] = {
    "local": (LocalRequest, "local"),
    "torchrun": (TorchrunRequest, "local"),
    "slurm": (SlurmRequest, "slurm"),
    "modal": (ModalRequest, "modal_app"),
    "skypilot": (SkyPilotRequest, "skypilot"),
}
