import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import checkpoints, find_checkpoint, read_group, read_manifest
from fullstride.meanflow.config.schema import DataConfig, LossConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.order import epoch_orders
from fullstride.meanflow.training.batch_share import check_parts
from fullstride.meanflow.training.trainer import train
from fullstride.runs.folder import METRICS, read_metrics
from fullstride.step.torch import Processes, Shards
from tests.meanflow.training.test_trainer import assert_identical, config, groups, learned
from tests.meanflow.training.together import settings


@pytest.fixture(scope="module")
def together(forked, tmp_path_factory) -> Path:
    """Return what the scenarios left, each in its folder; one process imports, and forks those of all scenarios."""
    folder = tmp_path_factory.mktemp("together")
    (done,) = forked(["tests.meanflow.training.together", str(folder)])
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def torchrun(*args: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *args], capture_output=True, text=True, timeout=120, env=given)


def of(rank: int, size: int) -> Processes:
    """State of one process of several, without the others."""
    processes = Processes()
    processes.rank, processes.size = rank, size
    return processes


def test_steps_of_two_processes_are_those_of_one(together):
    folder = together / "steps_of_meanflow"
    alone = torch.load(folder / "ddp_0_of_1.pt")
    for kind in ("ddp", "fsdp"):
        first, second = (torch.load(folder / f"{kind}_{rank}_of_2.pt") for rank in (0, 1))
        assert alone.keys() == first.keys() == second.keys()
        for name in alone:
            # Metrics are fp32, gradients and weights fp64.
            rounding = 1e-6 if name.startswith("step") else 1e-11
            torch.testing.assert_close(first[name], alone[name], rtol=rounding, atol=rounding, msg=f"{kind} {name}")
            assert torch.equal(first[name], second[name]), name
    shared_alone = torch.load(folder / "fsdp_0_of_1.pt")
    assert all(torch.equal(shared_alone[name], alone[name]) for name in alone if name.startswith("weight"))


def test_what_one_process_cannot_make_auto_refuses_in_all(together):
    folder = together / "measured_steps"
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    (line,) = first.pop("said")
    assert "compile: " in line
    assert "Observed exception" in line
    assert second.pop("said") == []
    assert first == second
    assert first["backend"] == "eager"


def test_compiled_backward_passes_send_what_they_have(together):
    folder = together / "compiled_steps"
    _, alone = torch.load(folder / "none_0.pt")
    for kind in ("ddp", "fsdp"):
        for rank in (0, 1):
            told, weights = torch.load(folder / f"{kind}_{rank}.pt")
            assert told == (4, 2)
            torch.testing.assert_close(weights, alone, rtol=1e-5, atol=1e-6)


def test_images_and_scores_of_two_processes_are_those_of_one(together):
    folder = together / "images"
    (alone, scores), (shared, others) = (torch.load(folder / f"images_of_{n}.pt") for n in (1, 2))
    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5)
    assert scores.keys() == others.keys() == {"meanflow 1", "meanflow 2", "meanflow 4", "floor"}
    for name, score in scores.items():
        assert others[name]["energy_distance"] == pytest.approx(score["energy_distance"], rel=1e-4)
        wanted = {
            key: pytest.approx(v, rel=1e-3) for key, v in score["features"]["classifier"].items() if key != "label"
        }
        assert others[name]["features"]["classifier"] == wanted | {"label": "FD-classifier"}


def test_two_processes_go_on_exactly_and_one_goes_on_from_them(together, capfd):
    folder = together / "runs_with_a_break"
    for kind in ("ddp", "fsdp"):
        straight, broken = (folder / f"{kind} {name}" / "run" for name in ("straight", "broken"))
        assert_identical(straight, broken)
        lines = [line for line in learned(straight) if "evaluation" not in line]
        assert lines == learned(broken)
        assert [line["step"] for line in lines] == list(range(1, 5))
        assert sum("evaluation" in line for line in read_metrics(straight)) == 1
        streams = read_group(find_checkpoint(straight), "rng")
        assert not torch.equal(streams["generator"], streams["1.generator"])
        assert not torch.equal(streams["cpu"], streams["1.cpu"])
    # Both share out the same steps, and a checkpoint is whole: neither names nor numbers tell which one made it.
    made = [groups(find_checkpoint(folder / f"{kind} straight" / "run")) for kind in ("ddp", "fsdp")]
    assert made[0].keys() == made[1].keys()
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-5)
    before = read_group(find_checkpoint(folder / "fsdp broken" / "run"), "model")
    alone = train(dataclasses.replace(settings(folder / "fsdp broken"), distributed="none", resume=True, epochs=3))
    assert "made by 2 processes" in capfd.readouterr().err
    assert read_manifest(find_checkpoint(alone))["position"]["step"] == 6
    assert read_manifest(find_checkpoint(alone))["processes"] == 1
    after = read_group(find_checkpoint(alone), "model")
    assert 0 < max((after[name] - before[name]).abs().max().item() for name in after) < 1e-2


def test_harm_to_one_process_is_undone_by_all(together):
    folder = together / "harmful_steps"
    ends = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert ends[0] == ends[1]
    assert "1 times after" in ends[0][0]
    assert [p.name for p in checkpoints(folder / "run")] == ["step_00000002"]


@pytest.mark.thorough
def test_a_failed_process_ends_all_with_its_reason(tmp_path):
    failed = torchrun("-m", "tests.meanflow.training.failing", str(tmp_path / "failed"))
    assert failed.returncode == 1
    assert "process 1 has had enough" in failed.stderr.partition("Root Cause")[2]
    assert [p.name for p in checkpoints(tmp_path / "failed" / "run")] == ["step_00000002"]


def test_processes_that_are_started_anew_after_a_failure_go_on(forked, tmp_path, monkeypatch):
    """As torchrun starts them: both attempts meet in one store."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": store.port,
        "WORLD_SIZE": 2,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    codes, said = [], []
    for attempt in (0, 1):
        for name, value in (given | {"TORCHELASTIC_RESTART_COUNT": attempt}).items():
            monkeypatch.setenv(name, str(value))
        lines = (["tests.meanflow.training.failing", str(tmp_path), str(rank)] for rank in (0, 1))
        ended = forked(*lines)
        codes.append([done.returncode for done in ended])
        said += [done.stderr for done in ended]
    assert 0 not in codes[0]
    assert re.search(r"unsaved: 1 step after .*step_00000002; to continue, run", said[0])
    assert codes[1] == [0, 0]
    assert [line["step"] for line in learned(tmp_path / "run")] == list(range(1, 7))


@pytest.mark.thorough
def test_after_a_failure_torchrun_starts_all_anew_and_they_go_on(tmp_path):
    again = torchrun("--max-restarts", "1", "-m", "tests.meanflow.training.failing", str(tmp_path / "again"))
    assert again.returncode == 0, again.stderr
    assert [line["step"] for line in learned(tmp_path / "again" / "run")] == list(range(1, 7))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_processes_save_and_leave_when_torchrun_is_killed(tmp_path):
    words = "distributed=ddp device=cpu model=unet_tiny model.channels=8 epochs=100000 data.batch_size=128 log_every=1"
    run = tmp_path / "a"
    train = ["-m", "fullstride", "meanflow", "train", *words.split(), f"output_dir={tmp_path}", "run_name=a"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (tmp_path / "log").open("w") as log:
        given = os.environ | {"OMP_NUM_THREADS": "1"}
        torchrun = subprocess.Popen([*launcher, *train], stdout=log, stderr=log, env=given)
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children")
    processes: list[int] = []
    try:
        # Two steps: a process that is told to stop within its first one has nothing to save.
        until(lambda: (run / METRICS).exists() and sum("loss" in line for line in read_metrics(run)) > 1)
        processes += map(int, children.read_text().split())
        torchrun.kill()
        torchrun.wait()
        assert len(processes) >= 2
        until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))
        (last,) = checkpoints(run)
        assert read_manifest(last)["position"]["step"] == learned(run)[-1]["step"] > 0
        assert all(line["images"] == 128 * line["step"] for line in learned(run))
    finally:
        torchrun.kill()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.thorough  # the test of a killed torchrun trains by it, too
def test_the_command_line_trains_in_two_processes(tmp_path):
    words = "meanflow train distributed=ddp device=cpu model=unet_tiny model.channels=8 epochs=1 data.batch_size=128"
    done = torchrun("-m", "fullstride", *words.split(), f"output_dir={tmp_path}", "run_name=a", "log_every=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained:") == 1
    assert all(line.get("images", 0) == 128 * line["step"] for line in read_metrics(tmp_path / "a") if "loss" in line)


@pytest.mark.thorough
def test_the_command_line_samples_in_two_processes(together, tmp_path):
    run = together / "runs_with_a_break" / "ddp straight" / "run"
    words = "meanflow", "sample", str(run), "--num", "5", "--device", "cpu", "--out", str(tmp_path)
    sampled = torchrun("-m", "--", "fullstride", *words)  # torchrun has an option that begins with --num
    assert sampled.stdout.count("5 images, 1 network") == 1, sampled.stderr
    assert len(list(tmp_path.glob("0*.png"))) == 5


def test_shares_are_the_whole_batch_and_no_record_twice(tmp_path):
    run = config(tmp_path, data=DataConfig(batch_size=8))
    given = run, load_data(run.data).train, 2, 5, 0
    whole, *shares = (next(epoch_orders(*given, of(rank, n))) for rank, n in ((0, 1), (0, 4), (1, 4), (2, 4), (3, 4)))
    assert all(share.shape == (2, 4) for share in shares)
    assert torch.equal(torch.stack(shares, dim=-1).flatten(1), whole)
    assert whole.unique().numel() == 32


def test_what_has_not_been_checked_is_refused(tmp_path, monkeypatch):
    run = settings(tmp_path)
    with pytest.raises(ConfigError, match=r"distributed=ddp device=mps: expected device=cuda or cpu"):
        check_parts(run, 2, "mps")
    with pytest.raises(ConfigError, match=r"over 3 processes: expected a multiple of 3; .* 222"):
        check_parts(run, 3, "cpu")
    with pytest.raises(
        ConfigError, match="meanflow_ratio=0.5 is 112 samples over the processes and 110 in one process"
    ):
        check_parts(run, 4, "cpu")
    few = dataclasses.replace(run, loss=LossConfig(weighting="huber"), data=DataConfig(batch_size=4))
    with pytest.raises(
        ConfigError, match="data.batch_size=4 over 4 processes: loss.weighting=huber expects at least 2"
    ):
        check_parts(few, 4, "cpu")
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node"):
        train(run)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="fsdp with Adagrad: expected one of SGD, Adam, AdamW"):
        Shards(model, torch.optim.Adagrad(model.parameters(), 0.1), of(0, 2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="distributed=none in one of 2 processes"):
        train(config(tmp_path))
