import json

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoint import (
    MANIFEST,
    checkpoints,
    find_checkpoint,
    read_group,
    read_manifest,
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
    (run / "checkpoints" / "step_00000099").mkdir()
    assert find_checkpoint(run).name == "step_00000012"


def test_a_damaged_file_is_refused(run):
    path = find_checkpoint(run)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
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


def test_another_format_and_a_broken_manifest_are_refused(run):
    path = find_checkpoint(run)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(ConfigError, match="format 2, this version reads 1"):
        read_manifest(path)
    (path / MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_manifest(path)
