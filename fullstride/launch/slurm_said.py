"""Messages of Slurm about a job that it is about to end, and about one that it does not take."""

import re
import subprocess
from typing import NoReturn

import submitit

from fullstride.errors import in_a_line
from fullstride.process import exit_codes
from fullstride.runs.atomic_files import note

PATIENCE = 60.0  # seconds for an answer of Slurm's controller


def leave(code: int) -> NoReturn:
    """End a job that was told to stop.

    One that Slurm preempts is requeued here: Slurm requeues only what is still there at the end of its grace time.
    """
    environment = submitit.JobEnvironment()
    if environment.global_rank == 0 and _is_preempted(environment.job_id):
        note("launch: preempted: the job is requeued, and goes on with resume=true")
        _scontrol("requeue", environment.job_id)
    else:
        note("launch: told to stop; the same command with resume=true goes on")
    # Not 0, or jobs that wait for this one would begin.
    raise SystemExit(code or exit_codes.FAILED)


def _is_preempted(job: str) -> bool:
    """Tell whether Slurm takes a job's machines for another; unlike a cancelled one, it counts as running meanwhile."""
    fields = dict(re.findall(r"(\S+?)=(\S*)", _scontrol("show", "job", "--oneliner", job)))
    return fields.get("JobState") == "RUNNING" and fields.get("PreemptTime", "None") not in ("None", "Unknown")


def _scontrol(*words: str) -> str:
    """Return scontrol's output; nothing if it fails, which it says itself."""
    try:
        done = subprocess.run(["scontrol", *words], stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        note(f"launch: scontrol {words[0]} failed: {in_a_line(error)}")
        return ""
    return done.stdout


def refused(said: str) -> str:
    """Put sbatch's message on one line."""
    lines = dict.fromkeys(line.removeprefix("sbatch: ").removeprefix("error: ") for line in said.splitlines() if line)
    return (
        f"launch slurm: sbatch refused the job ({'; '.join(lines) or 'without a word'}); expected a --partition, "
        "--account, --qos and sizes that this cluster has: sinfo and sacctmgr show assoc list them"
    )
