import json
import threading

import pytest
import torch

from fullstride.meanflow.metrics.reference import (
    by_one_process,
    cache_key,
    cached,
    read_entry,
    reference_folder,
    write_entry,
)

VALUES = {"floor": 1 / 3, "label": "FD-x", "count": 7}


@pytest.fixture
def tensors():
    return {"a": torch.randn(5, 3), "b": torch.randn(2, dtype=torch.float64)}


def test_an_entry_comes_back_exactly(tmp_path, tensors, capsys):
    write_entry(tmp_path / "deep", "key", tensors, VALUES)
    entry = read_entry(tmp_path / "deep", "key")
    assert entry is not None
    assert entry[1] == VALUES
    assert all(torch.equal(entry[0][k], v) and entry[0][k].dtype == v.dtype for k, v in tensors.items())
    assert read_entry(tmp_path / "deep", "other") is None
    assert sorted(p.suffix for p in (tmp_path / "deep").iterdir()) == [".json", ".safetensors"]
    assert capsys.readouterr().err == ""


def test_a_second_entry_replaces_the_first(tmp_path, tensors):
    write_entry(tmp_path, "key", tensors, {"n": 1})
    write_entry(tmp_path, "key", {"a": tensors["a"] + 1}, {"n": 2})
    entry = read_entry(tmp_path, "key")
    assert entry is not None
    assert entry[1] == {"n": 2}
    assert torch.equal(entry[0]["a"], tensors["a"] + 1)


def flip_a_byte(folder):
    path = next(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(folder):
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-3])


def change_a_value(folder):
    entry = json.loads((folder / "key.json").read_text())
    entry["values"]["floor"] = 0.3334
    (folder / "key.json").write_text(json.dumps(entry))


DAMAGES = {
    "flipped": flip_a_byte,
    "cut": cut,
    "gone": lambda folder: next(folder.glob("*.safetensors")).unlink(),
    "value": change_a_value,
    "json": lambda folder: (folder / "key.json").write_text('{"sha256": '),
    "other": lambda folder: (folder / "key.json").write_text("[1]"),
    "empty": lambda folder: (folder / "key.json").write_bytes(b""),
    "binary": lambda folder: (folder / "key.json").write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_is_not_trusted_and_can_be_replaced(tmp_path, tensors, capsys, damage):
    write_entry(tmp_path, "key", tensors, VALUES)
    damage(tmp_path)
    assert read_entry(tmp_path, "key") is None
    note = capsys.readouterr().err
    assert "key.json: damaged cache entry (" in note
    assert note.endswith("computing it again\n")
    write_entry(tmp_path, "key", tensors, VALUES)
    assert read_entry(tmp_path, "key") is not None


def test_an_interrupted_write_leaves_the_old_entry(tmp_path, tensors, monkeypatch):
    write_entry(tmp_path, "key", tensors, VALUES)

    def stop(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_entry(tmp_path, "key", {"a": torch.zeros(1)}, {})
    entry = read_entry(tmp_path, "key")
    assert entry is not None
    assert entry[1] == VALUES
    assert not list(tmp_path.glob(".writing*"))


def test_a_folder_that_cannot_be_written_is_said(tmp_path, tensors, capsys):
    (tmp_path / "file").touch()
    write_entry(tmp_path / "file" / "cache", "key", tensors, VALUES)
    assert "nothing is cached" in capsys.readouterr().err


def test_keys_differ_with_every_part():
    parts = [("a", 1), ("a", "1"), ("a", 1, None), ("a1",), ("b", 1)]
    assert len({cache_key(*p) for p in parts}) == 5
    assert cache_key("a", 1) == cache_key("a", 1)


def test_the_folder_is_the_users_unless_the_environment_names_one(monkeypatch, tmp_path):
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path))
    assert reference_folder() == tmp_path / "reference"
    monkeypatch.setenv("FULLSTRIDE_CACHE", "")
    assert reference_folder().parts[-2:] == ("fullstride", "reference")


def test_of_many_that_want_an_entry_one_makes_it_and_the_others_wait_for_it(tmp_path, tensors):
    calls, begun, go_on = [], threading.Event(), threading.Event()

    def make():
        calls.append(1)
        begun.set()
        assert go_on.wait(10)
        return tensors, VALUES

    found = []
    every = [threading.Thread(target=lambda: found.append(cached(tmp_path, "key", make))) for _ in range(4)]
    for one in every:
        one.start()
    assert begun.wait(10)
    assert cached(tmp_path, "another", lambda: (tensors, VALUES))[1] == VALUES
    assert not found
    go_on.set()
    for one in every:
        one.join(10)
    assert len(calls) == 1
    assert [values for _, values in found] == 4 * [VALUES]


def test_what_is_kept_waits_for_nobody(tmp_path, tensors):
    write_entry(tmp_path, "key", tensors, VALUES)
    found = []
    with by_one_process(tmp_path, "key"):
        reading = threading.Thread(target=lambda: found.append(cached(tmp_path, "key", pytest.fail)), daemon=True)
        reading.start()
        reading.join(10)
    assert [values for _, values in found] == [VALUES]


def test_a_damaged_entry_is_told_of_once_and_made_anew(tmp_path, tensors, capsys):
    write_entry(tmp_path, "key", tensors, VALUES)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(b"\0" * 100)
    assert cached(tmp_path, "key", lambda: (tensors, VALUES))[1] == VALUES
    assert capsys.readouterr().err.count("damaged cache entry") == 1
    assert read_entry(tmp_path, "key") is not None


def test_where_there_can_be_no_lock_there_is_none(tmp_path):
    (tmp_path / "file").touch()
    with by_one_process(tmp_path / "file" / "folder", "key"), by_one_process(tmp_path / "file" / "folder", "key"):
        pass
