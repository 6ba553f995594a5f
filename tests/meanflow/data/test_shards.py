import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fullstride.errors import ConfigError
from fullstride.meanflow.data.shards import Moments, Shard, write_latents, write_shard


def made(count: int, dtype=torch.float16) -> dict[str, Any]:
    return {
        "moments": torch.randn(count, 6, 2, 5).to(dtype),
        "labels": torch.randint(0, 9, (count,)),
        "moments_flip": torch.randn(count, 6, 2, 5).to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_written_is_read_record_by_record(tmp_path, seed, dtype):
    torch.manual_seed(seed)
    content = made(23, dtype)
    files = write_latents(tmp_path / "new" / "train", **content, shard_size=7)
    assert [f.name for f in files] == [f"0000{i}.safetensors" for i in range(4)]
    assert sorted(files[0].parent.iterdir()) == files
    shards = [Shard.read(file) for file in files]
    assert all(shard.shape == (6, 2, 5) and shard.flipped for shard in shards)
    assert torch.equal(torch.cat([shard.labels for shard in shards]), content["labels"])
    rows = np.random.default_rng(seed).permutation(23)[:19]
    for key in ("moments", "moments_flip"):
        store = Moments(shards, rows, key)
        assert len(store) == 19
        for i, row in enumerate(rows):
            assert torch.equal(store[i], content[key][row])
            assert store[i].dtype == dtype


def test_a_store_goes_to_another_process_without_its_files(tmp_path):
    content = made(5)
    store = Moments([Shard.read(f) for f in write_latents(tmp_path, **content, shard_size=2)], np.arange(5))
    fresh = pickle.dumps(store)
    assert torch.equal(store[3], content["moments"][3])
    assert pickle.dumps(store) == fresh
    assert torch.equal(pickle.loads(fresh)[4], content["moments"][4])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"moments": None}, "no moments; it holds labels, moments_flip"),
        ({"labels": None, "moments": None}, "no moments and no labels"),
        ({"moments": torch.zeros(4, 5, 2, 5)}, r"moments has shape \(4, 5, 2, 5\), expected \(n, 2c, h, w\)"),
        ({"moments": torch.zeros(4, 6, 2)}, r"moments has shape \(4, 6, 2\)"),
        ({"moments": torch.zeros(0, 6, 2, 5)}, r"moments has shape \(0, 6, 2, 5\)"),
        ({"moments": torch.zeros(4, 6, 2, 5, dtype=torch.int32)}, "moments is I32, expected one of F16"),
        ({"moments_flip": torch.zeros(3, 6, 2, 5)}, r"moments_flip has shape .*, expected .* as moments"),
        ({"moments_flip": torch.zeros(4, 6, 2, 4)}, r"moments_flip has shape .*, expected .* as moments"),
        ({"moments_flip": torch.zeros(4, 6, 2, 5)}, "moments_flip is F32, expected F16 as moments"),
        ({"labels": torch.zeros(4)}, "labels are torch.float32, expected integers"),
        ({"labels": torch.zeros(4, dtype=torch.bool)}, "labels are torch.bool, expected integers"),
        ({"labels": torch.zeros(5, dtype=torch.int32)}, r"labels have shape \(5,\), expected one for each of 4"),
        ({"labels": torch.zeros(4, 1, dtype=torch.int32)}, r"labels have shape \(4, 1\)"),
        ({"labels": torch.tensor([3, -1, 0, 2])}, "label -1, expected 0 or more"),
    ],
)
def test_a_shard_that_is_none_is_refused(tmp_path, changed, message):
    file = tmp_path / "a.safetensors"
    save_file({key: value for key, value in (made(4) | changed).items() if value is not None}, file)
    with pytest.raises(ConfigError, match=f"a.safetensors: {message}"):
        Shard.read(file)


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_a_shard_cut_short_is_refused(tmp_path, left):
    write_shard(tmp_path / "a.safetensors", **made(4))
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[:left])
    with pytest.raises(ConfigError, match=r"^\S+a.safetensors: not a whole safetensors file \(.*\); write or copy it"):
        Shard.read(tmp_path / "a.safetensors")


def test_a_shard_that_is_gone_is_refused_when_it_is_read(tmp_path):
    write_shard(tmp_path / "a.safetensors", **made(4))
    store = Moments([Shard.read(tmp_path / "a.safetensors")], np.arange(4))
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.safetensors"):
        store[0]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64])
def test_labels_of_any_integer_type_become_the_same(tmp_path, kind):
    content = made(4)
    write_shard(tmp_path / "a.safetensors", content["moments"], content["labels"].to(kind))
    got = Shard.read(tmp_path / "a.safetensors")
    assert got.labels.dtype == torch.int64
    assert torch.equal(got.labels, content["labels"])
    assert not got.flipped


def test_nothing_is_written_that_could_not_be_read(tmp_path):
    content = made(4)
    with pytest.raises(ConfigError, match="label -1"):
        write_latents(tmp_path, content["moments"], content["labels"] * 0 - 1)
    content["moments_flip"][2, 3, 0, 0] = torch.inf
    with pytest.raises(ConfigError, match="record 2 of moments_flip: holds numbers that are not finite"):
        write_latents(tmp_path, **content)
    assert not list(tmp_path.iterdir())


def test_a_set_is_written_whole_or_not_at_all(tmp_path):
    """Its first shards alone would be read as a set, and would keep the next attempt from being written."""
    content = made(25)
    broken = content["moments"].clone()
    broken[22, 0, 0, 0] = torch.nan
    with pytest.raises(ConfigError, match="record 2 of moments: holds numbers that are not finite"):
        write_latents(tmp_path / "a", broken, content["labels"], shard_size=10)
    with pytest.raises(ConfigError, match="25 moments, 19 labels in shards of 10, expected equal numbers of each"):
        write_latents(tmp_path / "a", content["moments"], content["labels"][:19], shard_size=10)
    with pytest.raises(ConfigError, match="in shards of 0, expected"):
        write_latents(tmp_path / "a", content["moments"], content["labels"], shard_size=0)
    assert len(write_latents(tmp_path / "a", **content, shard_size=10)) == 3


def test_no_records_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"moments has shape \(0, 6, 2, 5\)"):
        write_latents(tmp_path, **made(0))
    assert not list(tmp_path.iterdir())


def test_others_may_read_a_shard(tmp_path):
    (file,) = write_latents(tmp_path, **made(4))
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_store_tells_where_a_record_is_from(tmp_path):
    files = write_latents(tmp_path, **made(9), shard_size=4)
    store = Moments([Shard.read(file) for file in files], np.array([8, 3, 4]), "moments_flip")
    found = [store.origin(i) for i in range(3)]
    assert found == [f"{files[i]}: record {row} of moments_flip" for i, row in ((2, 0), (0, 3), (1, 0))]


def test_shards_are_not_written_beside_others(tmp_path):
    write_latents(tmp_path, **made(4))
    with pytest.raises(ConfigError, match="holds 00000.safetensors already"):
        write_latents(tmp_path, **made(4))


@pytest.mark.parametrize("entry", [{"name": "x" * 5000 + "\n"}, {"dtype": "X" * 5000}, {"shape": [int("9" * 400)]}])
def test_what_strangers_write_into_a_header_is_one_line(tmp_path, entry):
    name = entry.pop("name", "moments")
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **entry}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ConfigError) as caught:
        Shard.read(tmp_path / "a.safetensors")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400 + len(str(tmp_path))
