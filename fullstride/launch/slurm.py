"""Slurm through submitit: one job per run, or a job array for a sweep; requeued with resume=true at its time limit."""

import io
import math
import os
import re
import shlex
import subprocess
from contextlib import redirect_stderr
from copy import copy
from pathlib import Path
from typing import Any, NoReturn

import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError
from submitit.helpers import DelayedSubmission

from fullstride.errors import ConfigError, one_line, one_of
from fullstride.launch.attempts import REASONS, Attempt, attempt_all, exit_code
from fullstride.launch.processes import single_command, torchrun_command
from fullstride.launch.request import LaunchPlan, SlurmRequest
from fullstride.launch.words import Words, runs_of
from fullstride.process import exit_codes
from fullstride.runs.atomic_files import note

EXECUTORS: dict[str, type] = {
    "slurm": submitit.SlurmExecutor,
    "local": submitit.LocalExecutor,  # jobs of this machine, which end with it
}
WARNING = 240  # seconds before the end of its time at which a job is asked to save
SAVING = 150.0
PATIENCE = 60.0  # seconds for an answer of Slurm's controller
LEAST = 8  # minutes; of fewer most would lie behind the warning, which may come a minute early
PORT = 29400
# Flags of sbatch that options set, or that a job and its processes rely on.
OWN = {
    "time", "nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "cpus-per-task", "mem", "partition",
    "account", "qos", "constraint", "job-name", "signal", "array", "requeue", "no-requeue", "output", "error",
    "open-mode",
}  # fmt: skip
# Options that submitit's executor of this machine has no use for.
SLURMS = ("gpu", "cpus", "memory", "partition", "account", "qos", "constraint", "setup", "sbatch")


class SlurmJob:
    """Job that runs on each machine; picklable, and submitted anew by submitit when its time is up."""

    def __init__(self, words: Words, request: SlurmRequest):
        """Take a command."""
        self.words, self.request = words, request
        self.again = False  # whether an earlier job has begun it
        self._attempt: Attempt | None = None

    def __call__(self) -> int:
        """Make attempts until one ends in a way that another cannot better; return its exit code.

        Raises:
            SystemExit: with its exit code if it failed and Slurm runs the job, so that the job's state says so. Also
                if it was asked to stop, after it saved; a job that Slurm preempts is requeued first.

        """
        request = self.request
        # Slurm itself requeues jobs that it has preempted, from what was submitted first.
        again = self.again or int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
        try:
            ended = attempt_all(
                self.words,
                self.line,
                retries=request.own_retries,
                delay=request.delay,
                seconds=0.0,
                again=again,
                start=self._start,
            )
        except UncompletedJobError as error:  # raised by submitit's handler of the warning, after `checkpoint`
            note(f"launch: {one_line(error)} To continue, run the same command with resume=true")
            raise SystemExit(exit_codes.FAILED) from None
        if not request.is_submitted:
            return exit_code(ended)
        if ended.told:
            _leave(exit_code(ended))
        if ended.code:
            note(f"launch: exit code {ended.code}: {ended.why}")
            raise SystemExit(exit_code(ended))
        return ended.code

    def line(self, words: Words) -> list[str]:
        """Return the command line of this machine of the job."""
        if self.request.all_processes == 1:
            return single_command(words)
        environment = submitit.JobEnvironment()
        # An array's jobs, 7_0, 7_1, ..., may begin on one machine: each has a port of its own.
        meeting = f"{environment.hostnames[0]}:{PORT + sum(map(int, environment.job_id.split('_'))) % 1000}"
        return self._line(words, meeting, environment.job_id)

    def shown(self) -> str:
        """Return the first attempt's command line on each machine, for a shell; capitals stand for Slurm's values.

        Raises:
            ConfigError: for a command that several processes cannot share.

        """
        return shlex.join(self._line(self.words, "FIRST_HOST:PORT", "JOB_ID"))

    def _line(self, words: Words, meeting: str, job: str) -> list[str]:
        nodes, restarts = self.request.nodes, self.request.retries
        return torchrun_command(
            words, self.request.processes_each, restarts=restarts, nodes=nodes, meeting=meeting, job=job
        )

    def _start(self, line: list[str]) -> Attempt:
        self._attempt = Attempt(line)
        return self._attempt

    def checkpoint(self) -> DelayedSubmission:
        """Let the run save and requeue the rest; submitit calls this shortly before the time limit."""
        if self._attempt:
            # Told, as the error by which submitit ends a job for good is lost if a handler of logging's catches it.
            self._attempt.end(SAVING, told=True)
        later = copy(self)
        later.again, later._attempt = True, None
        return DelayedSubmission(later)


class _WithoutSlurm(submitit.SlurmExecutor):
    """Executor that writes the script to submit on a machine without Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 1

    def script(self) -> str:
        return self._make_submission_file_text(self._submitit_command_str, "uid")


def parameters(request: SlurmRequest) -> dict[str, Any]:
    """Return the parameters of submitit's executor."""
    gpus, minutes = request.gpus, math.ceil(60 * request.time)
    if not request.is_submitted:
        return {"timeout_min": minutes, "gpus_per_node": gpus, "nodes": request.nodes, "signal_delay_s": WARNING}
    given = {
        "job_name": request.name,
        "time": minutes,
        "nodes": request.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": f"{request.gpu}:{gpus}" if request.gpu and gpus else gpus or None,
        "cpus_per_task": request.cpus or request.processes,
        "mem": None if request.memory is None else f"{round(1024 * request.memory)}MB",
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
        "constraint": request.constraint,
        "setup": list(request.setup) or None,
        "signal_delay_s": WARNING,
        "additional_parameters": {"requeue": True} | _flags(request.sbatch),
    }
    return {key: value for key, value in given.items() if value is not None}


def _flags(given: tuple[str, ...]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for flag in given:
        key, equals, value = flag.lstrip("-").partition("=")
        if not key:
            raise ConfigError(f"--sbatch {flag}: expected KEY=VALUE or KEY, a flag of sbatch without --")
        if key.replace("_", "-") in OWN:
            raise ConfigError(
                f"--sbatch {flag}: expected another flag; {key} is set by an option of launch, or the job relies on it"
            )
        flags[key] = value if equals else True
    return flags


def plan(request: SlurmRequest, words: Words) -> LaunchPlan:
    """Plan one job for a command, a job array for a sweep.

    Raises:
        ConfigError: for a request that no job can meet, or a command that its processes cannot share.

    """
    one_of("--cluster", request.cluster, EXECUTORS)
    if not request.is_submitted:
        if unused := [f"--{name}" for name in SLURMS if getattr(request, name)]:
            raise ConfigError(f"--cluster local: {', '.join(unused)} would have no effect here; leave them out")
        if request.nodes > 1:
            raise ConfigError(f"--nodes {request.nodes} --cluster local: expected 1, this machine")
    if not request.time:
        raise ConfigError("--time 0: expected hours above 0; Slurm gives every job a limit")
    if math.ceil(60 * request.time) < LEAST:
        raise ConfigError(
            f"--time {request.time:g}: expected {LEAST / 60:.2g} hours or more, as a job is told to save {WARNING} s "
            "before its end; a shorter one would be requeued without a step"
        )
    jobs = [SlurmJob(run, request) for run in runs_of(words)]
    folder = Path(request.folder) / request.name
    return LaunchPlan(_text(request, folder, jobs), lambda: _submit(request, folder, jobs))


def _text(request: SlurmRequest, folder: Path, jobs: list[SlurmJob]) -> str:
    commands = [f"# runs: {job.shown()}" for job in jobs]
    if not request.is_submitted:
        return "\n".join([f"submitit's {request.cluster} executor: {parameters(request)}", *commands])
    executor = _WithoutSlurm(folder, max_num_timeout=request.retries)
    executor.update_parameters(**parameters(request))
    if len(jobs) > 1:
        executor.parameters["map_count"] = len(jobs)
    return executor.script() + "\n".join(commands)


def _submit(request: SlurmRequest, folder: Path, jobs: list[SlurmJob]) -> int:
    try:
        executor = EXECUTORS[request.cluster](folder, max_num_timeout=request.retries)
    except RuntimeError as error:
        raise ConfigError(
            f"launch slurm: {error} Submit from a login node, or inspect the job with --dry-run"
        ) from None
    executor.update_parameters(**parameters(request))
    _check_qos(request.qos)
    try:
        # What sbatch says is in the error, too.
        with redirect_stderr(io.StringIO()), executor.batch():
            submitted = [executor.submit(job) for job in jobs]
    except FailedJobError as error:
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in str(error).splitlines() if line]
        raise ConfigError(
            f"launch slurm: sbatch refused the job ({'; '.join(dict.fromkeys(lines)) or 'without a message'}); "
            "expected --partition, --account, --qos and sizes of this cluster: sinfo and sacctmgr show assoc list them"
        ) from None
    for job in submitted:
        note(f"job {job.job_id}: {job.paths.stdout}")
    return exit_codes.DONE if request.is_submitted else _end_of(submitted)


def _end_of(submitted: list[Any]) -> int:
    """Wait for jobs that end with this process; return the exit code of the first that failed."""
    codes = []
    for job in submitted:
        if error := job.exception():  # of submitit itself, or a job that was killed
            note(f"launch: {error}")
        codes.append(exit_codes.FAILED if error else int(job.result()))
    for job, code in zip(submitted, codes, strict=True):
        if code:
            note(f"launch: job {job.job_id} ended with exit code {code}: {REASONS.get(code, job.paths.stderr)}")
    return next(filter(None, codes), exit_codes.DONE)


def _leave(code: int) -> NoReturn:
    """End a job that was asked to stop.

    One that Slurm preempts is requeued here: Slurm requeues only what is still there at the end of its grace time.
    """
    environment = submitit.JobEnvironment()
    # What Slurm takes the machines of for another job counts as running meanwhile, unlike a cancelled one.
    shown = _answer("scontrol", "show", "job", "--oneliner", environment.job_id) if environment.global_rank == 0 else ""
    fields = dict(re.findall(r"(\S+?)=(\S*)", shown))
    if fields.get("JobState") == "RUNNING" and fields.get("PreemptTime", "None") not in ("None", "Unknown"):
        note("launch: preempted: the job is requeued and resumes")
        _answer("scontrol", "requeue", environment.job_id)
    else:
        note("launch: stopped by a signal; to continue, run the same command with resume=true")
    # Not 0, or jobs that wait for this one would begin.
    raise SystemExit(code or exit_codes.FAILED)


def _check_qos(given: str | None) -> None:
    """Refuse what the cluster has not: sbatch takes any name, unless the cluster enforces limits.

    Raises:
        ConfigError: for such a name.

    """
    listed = _answer("sacctmgr", "show", "qos", "format=name", "--noheader", "--parsable2") if given else ""
    if known := listed.lower().split():  # none without accounting
        for name in (given or "").lower().split(","):
            one_of("--qos", name, known)


def _answer(program: str, *words: str) -> str:
    """Return a program's output, or "" if it fails, after a note."""
    try:
        done = subprocess.run([program, *words], stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        note(f"launch: {program} {words[0]} failed: {one_line(error)}")
        return ""
    return done.stdout
