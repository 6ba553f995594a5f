import json
import shutil

import pytest
import torch
from safetensors import SafetensorError

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints import folder as checkpoint_module
from fullstride.meanflow.checkpoints.folder import (
    MANIFEST,
    checkpoints,
    find_checkpoint,
    keep_newest,
    newest_whole,
    read_group,
    read_manifest,
    remove_later,
    tidy,
    write_checkpoint,
)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(5, 3, generator=g),
        "half": torch.randn(7, generator=g).bfloat16(),
        "step": torch.tensor(3.0),
        "bytes": torch.randint(0, 255, (9,), generator=g, dtype=torch.uint8),
    }


@pytest.fixture
def run(tmp_path):
    for step in (5, 12):
        write_checkpoint(tmp_path / "checkpoints", step, {"model": tensors(step)}, {"note": step})
    return tmp_path


def test_what_was_written_is_read_bit_for_bit(run, seed):
    groups = {"model": tensors(seed), "rng": tensors(seed + 1)}
    path = write_checkpoint(run / "checkpoints", 20, groups, {"position": {"step": 20}})
    for name, group in groups.items():
        read = read_group(path, name)
        assert read.keys() == group.keys()
        assert all(torch.equal(read[k], group[k]) and read[k].dtype == group[k].dtype for k in group)
    assert read_manifest(path)["position"] == {"step": 20}


def test_the_newest_is_found_from_the_run_and_any_by_its_own_path(run):
    older, newest = checkpoints(run)
    assert find_checkpoint(run) == newest
    assert find_checkpoint(older) == older


def test_a_shared_or_sliced_tensor_is_saved_whole(run):
    base = torch.arange(12.0).view(3, 4)
    path = write_checkpoint(run / "checkpoints", 30, {"model": {"a": base.t(), "b": base[1:]}}, {})
    assert torch.equal(read_group(path, "model")["a"], base.t())


def test_saving_the_same_step_again_replaces_it(run):
    path = write_checkpoint(run / "checkpoints", 12, {"model": tensors(99)}, {"note": "new"})
    assert read_manifest(path)["note"] == "new"
    assert len(checkpoints(run)) == 2


def test_a_failed_write_leaves_the_old_checkpoints_and_no_litter(run):
    before = sorted(run.rglob("*"))
    with pytest.raises(TypeError):
        write_checkpoint(run / "checkpoints", 12, {"model": tensors(0)}, {"bad": object()})
    assert sorted(run.rglob("*")) == before
    assert read_manifest(checkpoints(run)[-1])["note"] == 12


def test_a_half_written_checkpoint_does_not_count(run):
    (run / "checkpoints" / ".writing_step_00000099").mkdir()
    assert find_checkpoint(run).name == "step_00000012"
    assert len(checkpoints(run)) == 2


def test_one_that_lost_its_manifest_is_refused_by_name_too(run, capfd):
    older, newest = checkpoints(run)
    (newest / MANIFEST).unlink()
    assert newest_whole(run) == older
    assert f"refused: {newest}: no {MANIFEST}" in capfd.readouterr().err
    (older / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="every checkpoint is damaged"):
        newest_whole(run)


def test_others_may_read_a_checkpoint(run):
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in find_checkpoint(run).iterdir())


def test_a_damaged_file_is_refused(run):
    path = find_checkpoint(run)
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ConfigError, match=r"model.safetensors: sha256 .* the file is damaged"):
        read_group(path, "model")


def test_what_is_missing_is_named(run, tmp_path_factory):
    path = find_checkpoint(run)
    with pytest.raises(ConfigError, match=r"no ema.safetensors; it holds model.safetensors"):
        read_group(path, "ema")
    with pytest.raises(ConfigError, match="no checkpoint here; expected a run's folder"):
        find_checkpoint(tmp_path_factory.mktemp("empty"))
    with pytest.raises(ConfigError, match=f"no {MANIFEST}"):
        read_manifest(run)


def test_an_altered_manifest_is_refused(run):
    path = checkpoints(run)[-1] / MANIFEST
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest))  # another layout of the same content is the same
    assert read_manifest(path.parent)["note"] == 12
    path.write_text(json.dumps(manifest | {"note": 13}))
    with pytest.raises(ConfigError, match=r"manifest.json: its content does not match its checksum; it was altered"):
        read_manifest(path.parent)


@pytest.mark.parametrize("damage", ["truncate", "alter", "remove", "manifest"])
def test_a_damaged_newest_is_refused_by_name_and_the_one_before_is_used(run, damage, capfd):
    older, newest = checkpoints(run)
    file = newest / ("manifest.json" if damage == "manifest" else "model.safetensors")
    content = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content[:-7] if damage == "truncate" else content[:-1] + bytes([content[-1] ^ 1]))
    assert newest_whole(run) == find_checkpoint(run) == older
    told = capfd.readouterr().err
    assert "step_00000012" in told
    assert damage != "remove" or f"{file}: the file is gone" in told
    with pytest.raises(ConfigError):
        read_group(find_checkpoint(newest), "model")


def test_with_every_checkpoint_damaged_there_is_nothing_to_go_on_from(run, tmp_path_factory):
    for path in checkpoints(run):
        (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"every checkpoint is damaged \(step_00000012, step_00000005\)"):
        newest_whole(run)
    assert newest_whole(tmp_path_factory.mktemp("empty")) is None


def test_the_newest_are_kept(run):
    for step in (20, 30):
        write_checkpoint(run / "checkpoints", step, {"model": tensors(step)}, {})
    newest = checkpoints(run)[-1]
    keep_newest(run, 0, newest)
    assert len(checkpoints(run)) == 4
    keep_newest(run, 3, newest)
    assert [p.name for p in checkpoints(run)] == ["step_00000012", "step_00000020", "step_00000030"]
    keep_newest(run, 5, newest)
    assert len(list((run / "checkpoints").iterdir())) == 3


def test_they_are_in_the_order_of_their_steps_whatever_their_names_lengths(run):
    folder = run / "checkpoints"
    for step in (10**8, 99_999_999):
        write_checkpoint(folder, step, {"model": tensors(step)}, {})
    assert [p.name for p in checkpoints(run)][-2:] == ["step_99999999", "step_100000000"]
    assert find_checkpoint(run).name == "step_100000000"
    *_, before, newest = checkpoints(run)
    keep_newest(run, 2, newest)
    assert checkpoints(run) == [before, newest]
    remove_later(run, newest)
    assert checkpoints(run) == [before, newest]
    remove_later(run, before)
    assert checkpoints(run) == [before]


def test_a_copy_under_another_name_stays(run):
    older, newest = checkpoints(run)
    kept = older.with_name(f"{older.name}_kept")
    shutil.copytree(older, kept)
    saved = write_checkpoint(run / "checkpoints", 20, {"model": tensors(20)}, {})
    keep_newest(run, 2, saved)
    assert checkpoints(run) == [newest, saved]
    assert find_checkpoint(kept) == kept


def test_a_damaged_one_ahead_takes_no_whole_ones_place(run):
    damaged = checkpoints(run)[-1]
    (damaged / "model.safetensors").write_bytes(b"")
    saved = write_checkpoint(run / "checkpoints", 8, {"model": tensors(8)}, {})
    keep_newest(run, 1, saved)
    assert checkpoints(run) == [saved, damaged]
    assert newest_whole(run) == saved


def test_what_a_killed_process_left_is_tidied(run):
    folder = run / "checkpoints"
    older, newest = checkpoints(run)
    newest.rename(folder / f".replaced_{newest.name}")  # killed between the two renames
    shutil.copytree(older, folder / f".replaced_{older.name}")  # killed before the old one was removed
    (folder / ".writing_abc").mkdir()
    (folder / ".writing_abc" / "model.safetensors").write_bytes(b"half")
    (folder / ".removing_step_00000001").mkdir()
    tidy(folder)
    assert sorted(p.name for p in folder.iterdir()) == [older.name, newest.name]
    assert newest_whole(run) == newest


def test_what_a_removal_left_keeps_no_step_from_being_saved_or_removed(run):
    folder = run / "checkpoints"
    older, newest = checkpoints(run)
    for left in (f".replaced_{newest.name}", f".removing_{older.name}"):
        (folder / left).mkdir()
        (folder / left / "model.safetensors").write_bytes(b"left")
    step = read_manifest(newest)["step"]
    write_checkpoint(folder, step, {"model": tensors(step)}, {})
    keep_newest(run, 1, newest)
    assert [p.name for p in folder.iterdir()] == [newest.name]
    assert newest_whole(run) == newest


def test_a_disk_that_refuses_costs_no_earlier_checkpoint(run, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"half a file")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    before = sorted(run.rglob("*"))
    monkeypatch.setattr(checkpoint_module, "save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_checkpoint(run / "checkpoints", 13, {"model": tensors(0)}, {})
    assert sorted(run.rglob("*")) == before


def test_another_format_and_a_broken_manifest_are_refused(run):
    path = find_checkpoint(run)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"format": 1}))
    with pytest.raises(ConfigError, match="format 1, this version reads 2"):
        read_manifest(path)
    (path / MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_manifest(path)
