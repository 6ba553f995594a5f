"""Launches on Modal by its own client: an app with one function, which Modal retries until the run is done."""

import secrets
import shlex
import sys
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import modal

from fullstride.errors import ConfigError
from fullstride.launch.container import CACHE, RUNS, TRACKING
from fullstride.launch.modal_function import SOURCE, attempt
from fullstride.launch.modal_refusals import refusals
from fullstride.launch.paths import check_inputs, check_output
from fullstride.launch.processes import sources, torchrun_command
from fullstride.launch.request import LaunchPlan, ModalRequest
from fullstride.launch.requirements import requirements
from fullstride.launch.words import Words, runs_of, shared_out, value_of

GPU = "A100-40GB"
VOLUMES = {TRACKING: "fullstride-tracking", CACHE: "fullstride-cache"}
LONGEST = 24.0  # hours
# What a run needs at the end of its time to make its step and its checkpoint.
MARGIN = 300.0


@dataclass(frozen=True)
class Spec:
    """Specification of one run on Modal; `text` shows it and `function` makes it."""

    words: Words
    image: dict[str, Any]
    function: dict[str, Any]
    retries: dict[str, Any]
    volumes: dict[str, str]
    arguments: dict[str, Any]
    detach: bool

    def text(self) -> str:
        """Description for people."""
        line = torchrun_command(self.words, self.arguments["processes"], restarts=0, python="python")
        lines = [
            f"app: fullstride, {'detached' if self.detach else 'ends with this command'}",
            f"command: {shlex.join(line)}",
            *(f"image {key}: {_shown(value)}" for key, value in self.image.items()),
            *(f"function {key}: {value}" for key, value in self.function.items()),
            f"function retries: {self.retries}; an attempt after the first goes on with resume=true",
            *(f"volume {name} at {path}" for path, name in self.volumes.items()),
            f"function is called with: {self.arguments}",
        ]
        return "\n".join(lines)


def spec_of(request: ModalRequest, words: Words) -> Spec:
    """Return the specification of one run.

    Raises:
        ConfigError: for a time above Modal's limit, a volume without a path, or a run whose results would be lost.

    """
    if not 0 < request.time <= LONGEST:
        raise ConfigError(f"--time {request.time:g}: expected hours above 0, {LONGEST:g} at most, which Modal allows")
    shared_out(words, request.processes_each)
    volumes = _volumes(request)
    check_output(words, [path for path in volumes if path not in VOLUMES])
    check_inputs(
        words,
        "put it on a volume (modal volume put NAME FOLDER) and give --volume NAME:/data and its path there, as "
        "data.path=/data/FOLDER",
    )
    launch = f"{value_of(words, 'run_name') or request.name}-{secrets.token_hex(4)}"
    return Spec(
        words=words,
        image={
            "from": request.image or "debian_slim",
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "pip": [*requirements(words), *request.pip],
            "source": {f"{SOURCE}/{name}": str(folder) for name, folder in sources(words).items()},
        },
        function=_function(request),
        retries={"max_retries": request.retries, "initial_delay": request.delay, "backoff_coefficient": 1.0},
        volumes=volumes,
        arguments={
            "words": words,
            "launch": launch,
            "volume": volumes[RUNS],
            "processes": request.processes_each,
            "seconds": max(request.seconds - MARGIN, 0.9 * request.seconds),
        },
        detach=request.detach,
    )


def _shown(value: object) -> str:
    if isinstance(value, dict):  # folders by their places
        return ", ".join(f"{folder} at {place}" for place, folder in value.items())
    return str(value)


def _function(request: ModalRequest) -> dict[str, Any]:
    kind = request.gpu or GPU
    several = f"{kind}:{request.gpus}" if request.gpus else None
    return {
        "gpu": kind if request.gpus == 1 else several,
        "timeout": round(request.seconds),
        "cpu": None if request.cpus is None else float(request.cpus),
        "memory": None if request.memory is None else round(1024 * request.memory),
        "secrets": list(request.secret),
    }


def _volumes(request: ModalRequest) -> dict[str, str]:
    volumes = {RUNS: request.runs, **VOLUMES}
    for given in request.volume:
        name, colon, path = given.partition(":")
        if not (name and colon and path.startswith("/")) or path in volumes:
            raise ConfigError(f"--volume {given}: expected NAME:/PATH, with a path that no other volume has")
        volumes[path] = name
    return volumes


def image_of(spec: Spec) -> modal.Image:
    """Return the container's image: this package as it is here, and its requirements."""
    parts = spec.image
    if parts["from"] == "debian_slim":
        image = modal.Image.debian_slim(python_version=parts["python"])
    else:
        image = modal.Image.from_registry(parts["from"], add_python=parts["python"])
    image = image.pip_install(*parts["pip"])
    for place, folder in parts["source"].items():
        image = image.add_local_dir(folder, place, ignore=["**/__pycache__", "**/*.pyc"])
    return image


def app_of(spec: Spec) -> tuple[modal.App, modal.Function]:
    """Make the app and its function with Modal's client, which checks them.

    Raises:
        ConfigError: with the client's message.

    """
    with refusals():
        app = modal.App("fullstride")
        given: dict[str, Any] = spec.function | {
            "secrets": [modal.Secret.from_name(name) for name in spec.function["secrets"]]
        }
        volumes: dict[str | PurePosixPath, Any] = {
            path: modal.Volume.from_name(name, create_if_missing=True) for path, name in spec.volumes.items()
        }
        function = app.function(
            image=image_of(spec),
            volumes=volumes,
            retries=modal.Retries(**spec.retries),
            include_source=False,
            **given,
        )(attempt)
    return app, function


def plan(request: ModalRequest, words: Words) -> LaunchPlan:
    """Plan one app for a command, one each for the runs of a sweep.

    Raises:
        ConfigError: for what Modal would refuse.

    """
    specs = [spec_of(request, run) for run in runs_of(words)]
    made = [app_of(spec) for spec in specs]

    def submit() -> int:
        return max([_submit(spec, *parts) for spec, parts in zip(specs, made, strict=True)])

    return LaunchPlan("\n\n".join(spec.text() for spec in specs), submit)


def _submit(spec: Spec, app: modal.App, function: modal.Function) -> int:
    with refusals(), modal.enable_output(), app.run(detach=spec.detach):
        if spec.detach:
            function.spawn(**spec.arguments)
            return 0
        code: Any = function.remote(**spec.arguments)
    return int(code)
