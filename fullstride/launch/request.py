"""What is asked of a machine, and which backend can be asked for what."""

import re
from dataclasses import dataclass, fields
from typing import Any

from fullstride.errors import ConfigError, one_of

BACKENDS = ("local", "torchrun", "slurm", "modal", "skypilot")

# Besides these, every backend takes --name, --retries, --retry-delay and --time.
OPTIONS: dict[str, set[str]] = {
    "local": set(),
    "torchrun": {"processes"},
    "slurm": {
        "processes", "gpus", "gpu", "nodes", "cpus", "memory", "partition", "account", "qos", "constraint", "setup",
        "sbatch", "folder", "cluster",
    },
    "modal": {"gpus", "gpu", "cpus", "memory", "image", "pip", "volume", "runs", "secret", "detach"},
    "skypilot": {"gpus", "gpu", "nodes", "cpus", "memory", "image", "pip", "setup", "runs", "spot", "folder"},
}  # fmt: skip
HOURS = 12.0
DELAY = 30.0  # seconds


@dataclass(frozen=True)
class Request:
    """What `fullstride launch` was asked for; None where nothing was said, for the backend to choose.

    Attributes:
        backend: one of `BACKENDS`.
        name: of the job.
        retries: attempts after the first one.
        retry_delay: seconds before each; none may be given where torchrun makes them.
        time: hours of one attempt; 0 is without a limit.
        processes: by torchrun on this machine, or on each of Slurm's where they train on its processor.
        gpus, gpu: how many a machine, and of which kind.
        nodes: machines.
        cpus, memory: cores and GiB of a machine.
        partition, account, qos, constraint: Slurm's.
        setup: shell lines before the command.
        sbatch: further flags of sbatch, KEY=VALUE each.
        cluster: slurm, or local, submitit's stand-in for one.
        folder: where job files are written.
        image: of the container.
        pip: further packages.
        volume: NAME:PATH, each a volume to mount.
        runs: the volume or bucket of runs.
        secret: names of Modal's secrets.
        detach: go on when this command ends.
        spot: machines that may be taken away.

    """

    backend: str
    name: str = "fullstride"
    retries: int | None = None
    retry_delay: float | None = None
    time: float | None = None
    processes: int | None = None
    gpus: int | None = None
    gpu: str | None = None
    nodes: int | None = None
    cpus: int | None = None
    memory: float | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    setup: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    cluster: str | None = None
    folder: str | None = None
    image: str | None = None
    pip: tuple[str, ...] = ()
    volume: tuple[str, ...] = ()
    runs: str | None = None
    secret: tuple[str, ...] = ()
    detach: bool | None = None
    spot: bool | None = None

    @property
    def all_processes(self) -> int:
        """That share the command: one for each GPU of each machine, or as many as were asked for here; 1 at least."""
        return (self.processes or 1) * (self.gpus or 1) * (self.nodes or 1)

    @property
    def attempts_after(self) -> int:
        """Retries: 5 unless told."""
        return 5 if self.retries is None else self.retries

    @property
    def delay(self) -> float:
        """Seconds before each of them: 30 unless told."""
        return DELAY if self.retry_delay is None else self.retry_delay

    @property
    def by_torchrun(self) -> bool:
        """Whether torchrun makes them, at once: those of several processes, except on Modal, which makes its own."""
        return self.all_processes > 1 and self.backend != "modal"

    @property
    def hours(self) -> float:
        """Of one attempt: 12 where a machine is lent, without a limit on one's own."""
        if self.time is not None:
            return self.time
        return 0.0 if self.backend in ("local", "torchrun") else HOURS

    @property
    def seconds(self) -> float:
        """Of one attempt."""
        return 3600 * self.hours


def check(request: Request) -> Request:
    """Refuse what the backend cannot do.

    Raises:
        ConfigError: for an unknown backend, an option of another one, or a value that cannot be.

    """
    one_of("--backend", request.backend, BACKENDS)
    common = {"backend", "name", "retries", "retry_delay", "time"}
    for option in (field.name for field in fields(request) if field.name not in common | OPTIONS[request.backend]):
        if (value := getattr(request, option)) not in (None, ()):
            raise ConfigError(
                f"--{option} {_shown(value)}: --backend {request.backend} has no such option; only {_takers(option)} it"
            )
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", request.name):
        raise ConfigError(f"--name {request.name}: expected lower-case letters, digits and -, beginning with a letter")
    _check_numbers(request)
    if request.backend == "slurm" and request.processes and request.gpus != 0:
        raise ConfigError(
            f"--processes {request.processes}: expected --gpus 0 beside it, as of GPUs each has a process of its own"
        )
    if request.retry_delay is not None and request.by_torchrun:
        raise ConfigError(
            f"--retry-delay {request.retry_delay:g}: --backend {request.backend} of {request.all_processes} processes "
            "has no such option: torchrun starts them anew at once; leave it out"
        )
    return request


def _check_numbers(request: Request) -> None:
    for option in ("processes", "nodes", "cpus"):
        if (value := getattr(request, option)) is not None and value < 1:
            raise ConfigError(f"--{option} {value}: expected at least 1")
    for option in ("retries", "retry_delay", "time", "gpus", "memory"):
        if (value := getattr(request, option)) is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"--{option.replace('_', '-')} {value}: expected a finite number, at least 0")


def _takers(option: str) -> str:
    """The backends that an option is for, with their verb."""
    *others, last = (name for name, options in OPTIONS.items() if option in options)
    return f"{', '.join(others)} and {last} have" if others else f"{last} has"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
