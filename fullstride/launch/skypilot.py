"""SkyPilot tasks as YAML, for `sky jobs launch`; preempted machines are replaced, and the run continues."""

import importlib
import importlib.util
import secrets
import shlex
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from fullstride.errors import ConfigError, one_line
from fullstride.launch.container import CACHE, ENVIRONMENT, RUNS, TRACKING, WORK
from fullstride.launch.paths import check_inputs, check_output
from fullstride.launch.processes import sources
from fullstride.launch.request import LaunchPlan, SkyPilotRequest
from fullstride.launch.requirements import requirements
from fullstride.launch.words import Words, runs_of, shared_out, value_of

GPU = "A100"
SOURCE = f"{WORK}/source"
PORT = 29400
PYTHON = f"{WORK}/venv/bin/python"


def task_of(request: SkyPilotRequest, words: Words, launch: str) -> dict[str, Any]:
    """Return a task in the structure of SkyPilot's YAML.

    Args:
        request: options of the launch.
        words: words of the command.
        launch: name of the launch, the same on every machine.

    Raises:
        ConfigError: for a command that several processes cannot share, or a run that would be lost.

    """
    shared_out(words, request.all_processes)
    check_output(words, [RUNS])
    check_inputs(words, "fetch it by --setup, and give its absolute path")
    return {
        "name": request.name,
        "num_nodes": request.nodes,
        "resources": _resources(request),
        "envs": ENVIRONMENT | {"PYTHONPATH": SOURCE},
        "file_mounts": {
            **{f"{SOURCE}/{name}": str(folder) for name, folder in sources(words).items()},
            # Written through a cache: a plain bucket takes neither appended lines nor renamed folders.
            RUNS: {"name": request.runs, "mode": "MOUNT_CACHED"},
            TRACKING: {"name": f"{request.runs}-tracking", "mode": "MOUNT_CACHED"},
        },
        "setup": _setup(request, words),
        "run": _run(request, words, launch),
    }


def _resources(request: SkyPilotRequest) -> dict[str, Any]:
    given = {
        "accelerators": f"{request.gpu or GPU}:{request.gpus}" if request.gpus else None,
        "cpus": None if request.cpus is None else f"{request.cpus}+",
        "memory": None if request.memory is None else f"{request.memory:g}+",
        "image_id": f"docker:{request.image}" if request.image else None,
        "use_spot": request.spot,
    }
    return {key: value for key, value in given.items() if value is not None}


def _setup(request: SkyPilotRequest, words: Words) -> str:
    packages = shlex.join([*requirements(words), *request.pip])
    lines = [
        f"sudo mkdir -p {CACHE} && sudo chown $(id -u) {WORK} {CACHE}",
        f"python3 -m venv {WORK}/venv",
        f"{PYTHON} -m pip install {packages}",
    ]
    return "\n".join([*lines, *request.setup]) + "\n"


def _run(request: SkyPilotRequest, words: Words, launch: str) -> str:
    options = [
        f"--launch={launch}", f"--runs={RUNS}", f"--retries={request.retries}",
        f"--delay={request.delay:g}", f"--seconds={request.seconds:g}", f"--processes={request.processes_each}",
    ]  # fmt: skip
    line = [PYTHON, "-m", "fullstride.launch.container", *options]
    shell = shlex.join(line)
    if request.nodes > 1:
        shell += f' --nodes={request.nodes} --rank="$SKYPILOT_NODE_RANK"'
        shell += f' --meeting="$(echo "$SKYPILOT_NODE_IPS" | head -n1):{PORT}"'
    return f"cd {WORK}\n{shell} -- {shlex.join(words)}\n"


def validated(task: dict[str, Any]) -> str:
    """Check a task with SkyPilot, if it is installed, and return a line that says whether it was.

    Raises:
        ConfigError: with SkyPilot's message, if it refuses the task.

    """
    if importlib.util.find_spec("sky") is None:
        return "not checked: SkyPilot is not installed here"
    sky = importlib.import_module("sky")
    try:
        sky.Task.from_yaml_config(deepcopy(task))  # it takes apart what it reads
    except ValueError as error:
        raise ConfigError(f"launch skypilot: {one_line(error)}") from None
    return f"checked by SkyPilot {sky.__version__}"


class _Dumper(yaml.SafeDumper):
    """Writes scripts as scripts."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _dumped(task: dict[str, Any]) -> str:
    return yaml.dump(task, Dumper=_Dumper, sort_keys=False, width=1000)


def plan(request: SkyPilotRequest, words: Words) -> LaunchPlan:
    """Write a file for each run, to be launched by `sky jobs launch`.

    Raises:
        ConfigError: for what SkyPilot refuses.

    """
    tasks = []
    for i, run in enumerate(runs := runs_of(words)):
        launch = f"{value_of(run, 'run_name') or request.name}-{secrets.token_hex(4)}"
        tasks.append(task_of(request, run, launch) | ({"name": f"{request.name}-{i}"} if len(runs) > 1 else {}))
    checked = {validated(task) for task in tasks}
    text = "---\n".join(_dumped(task) for task in tasks)
    return LaunchPlan(f"# {', '.join(checked)}\n{text}", lambda: _write(Path(request.folder), tasks))


def _write(folder: Path, tasks: list[dict[str, Any]]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        path = folder / f"{task['name']}.yaml"
        path.write_text(_dumped(task), encoding="utf-8")
        print(f"written; launch it with: sky jobs launch {shlex.quote(str(path))}")  # noqa: T201
    return 0
