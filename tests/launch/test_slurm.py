import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import submitit
from submitit.core.utils import UncompletedJobError

from fullstride.errors import ConfigError
from fullstride.launch import slurm
from fullstride.launch.request import SlurmRequest
from fullstride.launch.slurm import SlurmJob, plan
from tests.launch.commands import attempts_in
from tests.launch.jobs import Scripted, install

TRAIN = ["meanflow", "train", "epochs=3"]


def flags(text: str) -> set[str]:
    return {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}


def test_the_script_has_what_was_asked_for_and_its_defaults(tmp_path):
    text = plan(SlurmRequest(folder=str(tmp_path)), TRAIN).text
    expected = {"time=720", "nodes=1", "ntasks-per-node=1", "gpus-per-node=1", "requeue", "signal=USR2@240"}
    assert expected | {"job-name=fullstride", "open-mode=append"} <= flags(text)
    assert text.endswith(f"# runs: {sys.executable} -m fullstride meanflow train epochs=3")
    request = SlurmRequest(
        name="mine", time=1.5, gpus=4, gpu="h100", nodes=2, cpus=12, memory=96.5, partition="p", account="a",
        qos="q", constraint="c", setup=("module load x",), sbatch=("mail-type=END", "exclusive"), folder=str(tmp_path),
    )  # fmt: skip
    text = plan(request, TRAIN).text
    expected = {
        "time=90", "nodes=2", "gpus-per-node=h100:4", "cpus-per-task=12", "mem=98816MB", "partition=p", "account=a",
        "qos=q", "constraint=c", "mail-type=END", "exclusive", "job-name=mine",
    }  # fmt: skip
    assert expected <= flags(text)
    assert text.index("module load x") < text.index("srun ")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_a_job_array(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "runs_of", lambda words: [[*words[:2], f"seed={seed}"] for seed in (0, 1, 2)])
    text = plan(SlurmRequest(folder=str(tmp_path)), ["meanflow", "train", "-m", "seed=0,1,2"]).text
    assert "array=0-2%3" in flags(text)
    assert text.count(" -m fullstride meanflow train seed=") == 3


def test_what_no_job_can_be_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="--time 0: expected hours above 0"):
        plan(SlurmRequest(time=0.0), TRAIN)
    for cluster in ("slurm", "local"):
        with pytest.raises(
            ConfigError, match=r"--time 0\.1: expected 0\.13 hours or more, as a job is told to save 240 s"
        ):
            plan(SlurmRequest(time=0.1, cluster=cluster), TRAIN)
    assert plan(SlurmRequest(time=0.13, folder=str(tmp_path)), TRAIN).text
    with pytest.raises(ConfigError, match="--sbatch =x: expected KEY=VALUE"):
        plan(SlurmRequest(sbatch=("=x",)), TRAIN)
    with pytest.raises(ConfigError, match="bert train in 2 processes"):
        plan(SlurmRequest(gpus=2), ["bert", "train"])
    with pytest.raises(ConfigError, match="--cluster=pbs: expected one of"):
        plan(SlurmRequest(cluster="pbs"), TRAIN)


def test_without_slurm_nothing_is_submitted_and_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="srun.* Submit from a login node, or inspect the job with --dry-run"):
        plan(SlurmRequest(folder=str(tmp_path / "jobs")), TRAIN).submit()


def test_submitits_local_executor_runs_the_command(tmp_path, capfd):
    request = SlurmRequest(cluster="local", gpus=0, folder=str(tmp_path))
    assert plan(request, ["meanflow", "presets"]).submit() == 0
    (log,) = (tmp_path / "fullstride").glob("*_log.out")
    assert "cifar10_paper" in log.read_text()
    assert str(log) in capfd.readouterr().err
    assert plan(request, ["bert", "fill", "nothing"]).submit() == 2
    assert "ended with exit code 2: an invalid setting" in capfd.readouterr().err


def start(home: Path) -> subprocess.Popen:
    """Start a submitted script as Slurm does."""
    given = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0"}
    given |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "here"}
    return subprocess.Popen(["bash", str(home / "submitted")], env=os.environ | given)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)


def submit(folder: Path, job: SlurmJob) -> Path:
    slurm._submit(SlurmRequest(), folder, [job])
    return folder


def result(folder: Path) -> tuple[str, object]:
    return pickle.loads((folder / "7_0_result.pkl").read_bytes())


def test_a_job_whose_time_is_up_saves_is_requeued_and_goes_on(tmp_path, monkeypatch):
    home, record = install(tmp_path, monkeypatch), tmp_path / "record"
    record.mkdir()
    folder = submit(tmp_path / "jobs", Scripted(TRAIN, record, "saves", "75", "0"))
    assert (home / "calls").read_text().startswith("sbatch ")
    first = start(home)
    wait_for(record / "ready")
    (pid,) = pids_of(str(folder))
    os.kill(pid, signal.SIGUSR2)
    first.wait(30)
    assert "scontrol requeue 7" in (home / "calls").read_text()
    assert not (folder / "7_0_result.pkl").exists()
    assert start(home).wait(30) == 0
    assert attempts_in(record) == [TRAIN, [*TRAIN, "resume=true"], [*TRAIN, "resume=true"]]
    assert result(folder) == ("success", 0)


def pids_of(text: str) -> list[int]:
    """Python processes whose command line has a word, srun's own aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0") if path.exists() else []
        if text.encode() in words and words[0].endswith((b"python", b"python3")) and b"-u" in words[1:2]:
            found.append(int(path.parent.name))
    return found


def test_a_job_that_slurm_has_requeued_itself_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert Scripted(TRAIN, tmp_path, "0")() == 0
    assert attempts_in(tmp_path) == [[*TRAIN, "resume=true"]]


@pytest.mark.parametrize(("end", "attempts"), [("2", 1), ("12", 1), ("75", 4)])
def test_a_job_that_ends_badly_fails_with_its_exit_code(tmp_path, end, attempts, capfd):
    with pytest.raises(SystemExit) as failed:
        Scripted(TRAIN, tmp_path, end, retries=3)()
    assert failed.value.code == int(end)
    assert f"launch: exit code {end}: " in capfd.readouterr().err
    assert len(attempts_in(tmp_path)) == attempts


def test_several_processes_of_a_machine_without_a_gpu_share_a_run_and_have_a_core_each(tmp_path):
    text = plan(SlurmRequest(gpus=0, processes=3, folder=str(tmp_path)), TRAIN).text
    assert {"cpus-per-task=3", "ntasks-per-node=1"} <= flags(text)
    assert "--gpus" not in text
    assert "gpus-per-node" not in text
    assert "fullstride.launch.elastic --nproc-per-node=3 --max-restarts=5 --standalone" in text
    assert text.endswith("distributed=ddp")
    for gpus in (1, 4):
        with pytest.raises(ConfigError, match="--processes 3: expected --gpus 0 with it"):
            SlurmRequest(gpus=gpus, processes=3)


def test_several_machines_meet_at_the_first(monkeypatch):
    class Environment:
        hostnames = ("first", "second")
        job_id = "1234_5"

    monkeypatch.setattr(submitit, "JobEnvironment", Environment)
    line = SlurmJob(TRAIN, SlurmRequest(gpus=4, nodes=2)).line(TRAIN)
    assert line[2:] == [
        "fullstride.launch.elastic", "--nproc-per-node=4", "--max-restarts=5", "--nnodes=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=first:29639", "--rdzv-id=1234_5", "-m", "--", "fullstride", *TRAIN, "distributed=ddp",
    ]  # fmt: skip


def test_the_jobs_of_an_array_meet_at_ports_of_their_own(monkeypatch):
    """On one machine they would share the first one's store, and lose it at that one's end."""
    meetings = set()
    for job_id in ("1234_0", "1234_1", "1234_2"):
        environment = SimpleNamespace(hostnames=["first", "second"], job_id=job_id)
        monkeypatch.setattr(submitit, "JobEnvironment", lambda found=environment: found)
        line = SlurmJob(TRAIN, SlurmRequest(gpus=4, nodes=2)).line(TRAIN)
        meetings.add(next(word for word in line if word.startswith("--rdzv-endpoint")))
    assert len(meetings) == 3


@pytest.mark.parametrize("flag", ["nodes=3", "--time=5", "ntasks_per_node=2", "no-requeue"])
def test_flags_that_a_job_relies_on_are_not_passed(flag):
    with pytest.raises(ConfigError, match=f"--sbatch {flag}: expected another flag"):
        plan(SlurmRequest(sbatch=("exclusive", flag)), TRAIN)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"setup": ("module load cuda",), "cpus": 2}, "--cluster local: --cpus, --setup would have no effect here"),
        ({"sbatch": ("exclusive",)}, "--sbatch would have no effect here"),
        ({"nodes": 2}, "--nodes 2 --cluster local: expected 1, this machine"),
    ],
)
def test_what_has_no_effect_on_this_machine_is_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        plan(SlurmRequest(cluster="local", **given), TRAIN)


RUNNING = (
    "JobId=7 JobName=x UserId=me(1) JobState=RUNNING Reason=None Requeue=1 PreemptEligibleTime=2026-11-29T06:55:59"
)


def told(folder: Path, monkeypatch, state: str) -> tuple[int, list[str]]:
    """The exit code of a job that got SIGTERM while Slurm had this to say of it, and what was called."""
    home, record = install(folder, monkeypatch), folder / "record"
    record.mkdir()
    (home / "job").write_text(state)
    jobs = submit(folder / "jobs", Scripted(TRAIN, record, "saves", "0"))
    job = start(home)
    wait_for(record / "ready")
    (pid,) = pids_of(str(jobs))
    os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGTERM)
    code = job.wait(30)
    assert attempts_in(record) == [TRAIN]
    assert not (jobs / "7_0_result.pkl").exists()
    assert not [path for path in jobs.glob("*") if b"Traceback" in path.read_bytes()]
    return code, [line for line in (home / "calls").read_text().splitlines() if line.startswith("scontrol")]


def test_a_preempted_job_is_requeued_when_it_has_saved_before_its_grace_is_over(tmp_path, monkeypatch):
    code, calls = told(tmp_path, monkeypatch, f"{RUNNING} PreemptTime=2026-11-29T06:56:03 Account=(null)")
    assert calls == ["scontrol show job --oneliner 7", "scontrol requeue 7"]
    assert code != 0


@pytest.mark.parametrize(
    "state",
    [
        RUNNING + " PreemptTime=None",
        RUNNING.replace("RUNNING", "COMPLETING") + " PreemptTime=None",
        RUNNING.replace("RUNNING", "CANCELLED") + " PreemptTime=2026-11-29T06:56:03",
        "",
    ],
    ids=["told by somebody", "cancelled", "cancelled in its grace", "unknown"],
)
def test_a_job_that_is_told_to_stop_otherwise_fails_and_stays_so(tmp_path, monkeypatch, state):
    code, calls = told(tmp_path, monkeypatch, state)
    assert calls == ["scontrol show job --oneliner 7"]
    assert code != 0


def test_a_job_whose_last_time_is_up_is_not_completed_though_the_error_was_lost(tmp_path, monkeypatch):
    """submitit raises it from a handler of signals, and logging, in whose lines another handler may be, catches it."""
    install(tmp_path, monkeypatch)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    job = Scripted(TRAIN, tmp_path, "saves")

    def time_is_up() -> None:
        wait_for(tmp_path / "ready")
        job.checkpoint()

    thread = threading.Thread(target=time_is_up)
    thread.start()
    with pytest.raises(SystemExit) as left:
        job()
    thread.join()
    assert left.value.code not in (0, None)
    assert attempts_in(tmp_path) == [TRAIN]


def test_a_job_whose_last_time_is_up_fails_in_one_line(tmp_path, monkeypatch, capfd):
    job = Scripted(TRAIN, tmp_path, "0")

    def over(line: list[str]) -> None:
        raise UncompletedJobError("Job not requeued because: timed-out too many times.")

    monkeypatch.setattr(job, "_start", over)
    with pytest.raises(SystemExit) as left:
        job()
    assert left.value.code == 1
    expected = "launch: Job not requeued because: timed-out too many times. To continue, run the same command with"
    assert capfd.readouterr().err.startswith(expected)


@pytest.mark.parametrize("qos", ["High", "normal,high", "nope", "high,nope"])
@pytest.mark.parametrize("accounting", [True, False])
def test_a_qos_that_the_cluster_has_not_is_refused(tmp_path, monkeypatch, qos, accounting):
    home, job = install(tmp_path, monkeypatch), SlurmRequest(qos=qos, folder=str(tmp_path / "jobs"))
    said = "printf 'normal\\nhigh\\n'" if accounting else "echo 'no accounting' >&2; exit 1"
    (home / "sacctmgr").write_text(f"#!/bin/sh\n{said}\n")
    (home / "sacctmgr").chmod(0o755)
    if accounting and "nope" in qos:
        with pytest.raises(ConfigError, match="--qos=nope: expected one of .*high"):
            plan(job, TRAIN).submit()
        assert not (home / "calls").exists()
    else:
        assert plan(job, TRAIN).submit() == 0
        assert f"--qos={qos}" in next((tmp_path / "jobs").rglob("*.sh")).read_text()


def test_what_sbatch_refuses_is_one_line(tmp_path, monkeypatch, capfd):
    home = install(tmp_path, monkeypatch)
    said = "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: Invalid name"
    (home / "sbatch").write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}\nEND\nexit 1\n")
    match = r"sbatch refused the job \(invalid partition specified: nope; Batch job .* Invalid name\); expected --part"
    with pytest.raises(ConfigError, match=match) as refused:
        plan(SlurmRequest(partition="nope", folder=str(tmp_path / "jobs")), TRAIN).submit()
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""
