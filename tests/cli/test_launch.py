import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fullstride.cli.app import app
from fullstride.launch import processes
from tests.launch.commands import attempts_in, ending

TRAIN = ["meanflow", "train", "epochs=3"]


def launch(*words: str):
    return CliRunner().invoke(app, ["launch", *words])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Local attempts end as `end` says."""

    def end(*ends: str) -> None:
        monkeypatch.setattr(processes, "single_command", lambda words, _: ending(tmp_path, *ends)(words))

    monkeypatch.setattr("fullstride.cli.launch.check_command", lambda *given: None)
    return tmp_path, end


def test_the_command_runs_here_again_until_it_is_done(here):
    folder, end = here
    end("75", "killed", "0")
    result = launch("local", "--retry-delay", "0", "--", *TRAIN)
    assert result.exit_code == 0, result.output
    assert attempts_in(folder) == [TRAIN, [*TRAIN, "resume=true"], [*TRAIN, "resume=true"]]


@pytest.mark.parametrize(
    ("end", "retries", "code", "attempts"), [("2", 5, 2, 1), ("75", 1, 75, 2), ("killed", 0, 137, 1)]
)
def test_the_last_exit_code_is_passed_on(here, end, retries, code, attempts):
    folder, choose = here
    choose(end)
    result = launch("local", "--retry-delay", "0", "--retries", str(retries), *TRAIN)
    assert result.exit_code == code
    assert len(attempts_in(folder)) == attempts


def test_everything_after_the_first_word_is_the_command(here):
    folder, end = here
    end("0")
    assert launch("local", "meanflow", "train", "--multirun", "seed=1,2", "--help").exit_code == 0
    assert attempts_in(folder) == [["meanflow", "train", "--multirun", "seed=1,2", "--help"]]


def test_a_dry_run_shows_and_starts_nothing(here):
    folder, end = here
    end("0")
    shown = launch("local", "--dry-run", "--", *TRAIN).stdout
    assert "meanflow train epochs=3\n" in shown
    assert "retries: 5, 30 s apart, with resume=true" in shown
    shown = launch("torchrun", "--processes", "2", "--time", "1.5", "--dry-run", "--", *TRAIN).stdout
    assert "-m fullstride.launch.elastic --nproc-per-node=2 --max-restarts=5 --standalone -m -- fullstride" in shown
    assert shown.splitlines()[1:] == ["restarts: 5, by torchrun", "time: 1.5 h an attempt"]
    assert attempts_in(folder) == []


def test_a_dry_run_shows_the_line_that_starts_several_processes():
    train = ["meanflow", "train", "data=cifar10", "data.batch_size=64", "data.path=/my pictures"]
    words = "meanflow train data=cifar10 data.batch_size=64 'data.path=/my pictures' distributed=ddp"
    shared = f"--standalone -m -- fullstride {words}"
    for cluster in ("slurm", "local"):
        shown = launch("slurm", "--cluster", cluster, "--gpus", "2", "--dry-run", "--", *train).stdout
        line = f"# runs: {sys.executable} -m fullstride.launch.elastic --nproc-per-node=2 --max-restarts=5 {shared}"
        assert shown.splitlines()[-1] == line
    shown = launch("slurm", "--gpus", "2", "--nodes", "4", "--dry-run", "--", *train).stdout
    assert "--nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:PORT --rdzv-id=JOB_ID -m -- fullstride" in shown
    shown = launch("modal", "--gpus", "2", "--dry-run", "--", *train).stdout
    assert f"command: python -m fullstride.launch.elastic --nproc-per-node=2 --max-restarts=0 {shared}\n" in shown


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["torchrun", "--processes", "2"], 2),
        (["slurm", "--gpus", "2", "--nodes", "2"], 4),
        (["skypilot", "--nodes", "2"], 2),
    ],
)
def test_a_delay_is_refused_where_torchrun_starts_anew(words, count):
    result = launch(*words, "--retry-delay", "5", "--dry-run", "--", *TRAIN)
    assert result.exit_code == 2
    expected = f"error: --retry-delay 5: launch {words[0]} of {count} processes has no such option: torchrun starts"
    assert result.stderr.startswith(expected)
    assert launch("torchrun", "--retry-delay", "5", "--dry-run", "--", *TRAIN).exit_code == 0
    shown = launch("modal", "--gpus", "2", "--retry-delay", "5", "--dry-run", "--", *TRAIN).stdout
    assert "'initial_delay': 5.0" in shown


def test_a_real_command_in_a_real_process():
    done = subprocess.run(
        [sys.executable, "-m", "fullstride", "launch", "local", "--", "bert", "fill", "x"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "error: fill: expected either --run FOLDER or --weights FOLDER\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "moon", *TRAIN], "--backend=moon: expected one of"),
        (["local", "--retries", "-1", *TRAIN], "--retries -1: expected"),
        (["local", "launch", "x"], "expected a command without launch"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message):
    result = launch(*words)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line


def test_a_backend_or_an_option_that_there_is_not_is_named():
    result = launch("moon", *TRAIN)
    assert (result.exit_code, "No such command 'moon'" in result.stderr) == (2, True)
    result = launch("local", "--gpu", "H100", *TRAIN)
    assert (result.exit_code, "No such option: --gpu" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["torchrun", "--processes", "3"], 3),
        (["slurm", "--gpus", "3", "--nodes", "2"], 6),
        (["modal", "--gpus", "3"], 3),
        (["skypilot", "--nodes", "3"], 3),
    ],
)
def test_a_batch_that_the_processes_cannot_share_is_refused_with_nothing_submitted(words, count):
    result = launch(*words, "--dry-run", "--", "meanflow", "train", "data.batch_size=64")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: data.batch_size=64 over {count} processes: expected a multiple of {count}")


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (["modal", "llm", "serve"], "modal"),
        (["slurm", "llm", "serve"], "submitit"),
        (["skypilot", "llm", "serve"], "yaml"),
        (["sync"], "modal"),
        (["ckpts"], "modal"),
    ],
)
def test_a_missing_package_names_the_extra(words, package, monkeypatch):
    for module in [name for name in sys.modules if name.startswith("fullstride.launch.") and "command" not in name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    result = launch(*words)
    assert result.exit_code == 2
    assert (
        result.stderr == f"error: {package} is not installed; run, from the root of a clone: pip install '.[launch]'\n"
    )


def test_help_says_how():
    shown = launch("--help").stdout
    assert all(word in shown for word in ("launch modal --gpu H100", "sync", "ckpts", "skypilot"))
    shown = launch("slurm", "--help").stdout
    assert all(line in shown for line in ("Job:\n", "Machines:\n", "Slurm:\n", "--partition", "--gpus", "--dry-run"))
    assert "--secret" not in shown
    assert launch().exit_code == 2


@pytest.mark.parametrize(
    "before",
    [["--backend", "local", "--dry-run"], ["--dry-run", "--backend=local"], ["run", "--backend", "local", "--dry-run"]],
)
def test_the_old_spelling_is_taken_with_a_note(here, before):
    _, end = here
    end("0")
    command = ["--", "meanflow", "sample", "runs/x", "--backend", "graph"]
    result = launch(*before, *command)
    assert result.stderr == "fullstride launch --backend local is now: fullstride launch local\n"
    assert result.stdout == launch("local", "--dry-run", *command).stdout
    assert "meanflow sample runs/x --backend graph\n" in result.stdout
    assert launch("--dry-run", *command).exit_code == 2
