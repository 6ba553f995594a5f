import os
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullstride.cli.app import app


def launch(*words: str):
    return CliRunner().invoke(app, ["launch", *words])


def write(path: Path, content: bytes, mtime: int = 1_700_000_000) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (mtime, mtime))
    return content


@pytest.fixture
def volume(service, tmp_path):
    """Two runs, of which one is saving, and what else lies beside them."""
    folder = tmp_path / "volume"
    draw = random.Random(3)
    for run, steps in (("first", (8, 16)), ("second", (4,))):
        write(folder / run / "metrics.jsonl", b'{"step": 8}\n')
        for step in steps:
            checkpoint = folder / run / "checkpoints" / f"step_{step:08d}"
            write(checkpoint / "model.safetensors", draw.randbytes(draw.randint(1, 3_000_000)), 1_700_000_100 + step)
            write(checkpoint / "manifest.json", b"{}")
    (folder / "second" / "checkpoints" / "step_00000004" / "manifest.json").unlink()
    write(folder / "first" / "checkpoints" / ".writing_x" / "model.safetensors", b"half")
    write(folder / "first" / ".lock", b"")
    write(folder / ".launches" / "a-1.0", b"")
    service.volumes["fullstride-runs"] = folder
    return folder


def visible(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    relative = {path.relative_to(folder): path for path in paths}
    return {str(at): path.read_bytes() for at, path in relative.items() if not any(p.startswith(".") for p in at.parts)}


def test_checkpoints_are_listed_with_what_they_weigh_and_whether_they_are_whole(volume):
    result = launch("ckpts")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["first", "step_00000008"], ["first", "step_00000016"], ["second", "step_00000004"]
    ]  # fmt: skip
    size = sum(path.stat().st_size for path in (volume / "first/checkpoints/step_00000008").iterdir())
    assert f"{size / 2**20:.1f} MiB  2023-11-14 22:15:08 UTC" in lines[0]
    assert [line.endswith("incomplete") for line in lines] == [False, False, True]
    assert launch("ckpts", "--run", "second").stdout.count("\n") == 1


def test_berts_checkpoints_are_weighed_whole_and_stand_in_the_order_of_their_steps(volume):
    sizes = {}
    for step in (400, 1200, 1600):
        folder = volume / "words" / "checkpoints" / str(step)
        sizes[step] = sum(len(write(folder / name, b"x" * (step << 10))) for name in ("state/d/0", "extra/metadata"))
        write(folder / "state" / "commit_success.txt", b"")
        write(folder / "commit_success.txt", b"")
    (folder / "commit_success.txt").unlink()
    lines = launch("ckpts", "--run", "words").stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["words", str(step), f"{size / 2**20:.1f}"] for step, size in sizes.items()
    ]
    assert [line.endswith("incomplete") for line in lines] == [False, False, True]


def test_runs_are_fetched_and_then_only_what_is_new(volume, tmp_path, service):
    out = tmp_path / "runs"
    result = launch("sync", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert visible(out) == visible(volume)
    assert "fullstride-runs -> " in result.stdout
    service.calls.clear()
    assert "0 files, 0.0 MiB" in launch("sync", "--out", str(out)).stdout
    assert service.requests("VolumeGetFile2") == []
    write(volume / "first" / "metrics.jsonl", b'{"step": 9}\n', 1_700_009_000)
    write(volume / "first/checkpoints/step_00000024/manifest.json", b"{}")
    (volume / "first/checkpoints/step_00000008/manifest.json").unlink()
    assert "2 files" in launch("sync", "--out", str(out), "--run", "first").stdout
    assert visible(volume).items() <= visible(out).items()
    # What newer checkpoints have displaced there is not lost here.
    assert (out / "first/checkpoints/step_00000008/manifest.json").exists()


def test_a_run_of_this_machine_is_not_written_over(volume, tmp_path):
    mine = write(tmp_path / "runs" / "second" / "metrics.jsonl", b"mine")
    result = launch("sync", "--out", str(tmp_path / "runs"))
    assert result.exit_code == 2
    assert "second exists and was not fetched from fullstride-runs; choose another folder" in result.stderr
    assert (tmp_path / "runs" / "second" / "metrics.jsonl").read_bytes() == mine
    assert not (tmp_path / "runs" / "first").exists()


def test_a_file_that_goes_meanwhile_is_said_and_the_rest_is_fetched(volume, tmp_path, service):
    gone = volume / "first/checkpoints/step_00000008/model.safetensors"
    answer = service._VolumeListFiles2
    listed = answer(type("Request", (), {"volume_id": "vo-fullstride-runs", "path": "/"}))
    gone.unlink()
    service._VolumeListFiles2 = lambda _: listed
    try:
        result = launch("sync", "--out", str(tmp_path / "runs"))
    finally:
        del service._VolumeListFiles2
    assert result.exit_code == 0, result.output
    assert "step_00000008/model.safetensors: removed meanwhile" in result.stderr
    assert visible(tmp_path / "runs") == visible(volume)


def test_the_trackers_files_come_along_if_they_are_asked_for(volume, tmp_path, service):
    service.volumes["fullstride-tracking"] = tmp_path / "tracking"
    write(tmp_path / "tracking" / "fullstride.db", b"sqlite")
    result = launch("sync", "--out", str(tmp_path / "runs"), "--tracking", str(tmp_path / "here"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "here" / "fullstride.db").read_bytes() == b"sqlite"
    mine = write(tmp_path / "own" / "fullstride.db", b"mine")
    result = launch("sync", "--out", str(tmp_path / "runs"), "--tracking", str(tmp_path / "own"))
    assert result.exit_code == 2
    assert (tmp_path / "own" / "fullstride.db").read_bytes() == mine


def test_what_is_not_there_is_one_line(volume, tmp_path, service):
    result = launch("ckpts", "--volume", "nothing")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "modal: Volume 'nothing' not found" in result.stderr
    assert launch("ckpts", "--run", "third").exit_code == 2
    assert launch("sync", "--run", "../x", "--out", str(tmp_path)).exit_code == 2
    service.volumes["fullstride-runs"] = tmp_path / "empty"
    (tmp_path / "empty").mkdir()
    assert launch("ckpts").stdout == "no checkpoints on fullstride-runs\n"
