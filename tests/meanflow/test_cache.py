import json
import threading

import pytest
import torch

from fullstride.meanflow.metrics.cache import alone, cache_key, read_entry, reference_folder, write_entry

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
    assert note.endswith("computed anew\n")
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
    assert "nothing is kept" in capsys.readouterr().err


def test_keys_differ_with_every_part():
    parts = [("a", 1), ("a", "1"), ("a", 1, None), ("a1",), ("b", 1)]
    assert len({cache_key(*p) for p in parts}) == 5
    assert cache_key("a", 1) == cache_key("a", 1)


def test_the_folder_is_the_users_unless_the_environment_names_one(monkeypatch, tmp_path):
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path))
    assert reference_folder() == tmp_path / "reference"
    monkeypatch.setenv("FULLSTRIDE_CACHE", "")
    assert reference_folder().parts[-2:] == ("fullstride", "reference")


def test_who_wants_an_entry_that_another_makes_waits_and_reads_it(tmp_path, tensors):
    found, asks = [], threading.Event()

    def second():
        asks.set()
        with alone(tmp_path, "key"):
            found.append(read_entry(tmp_path, "key"))

    with alone(tmp_path, "key"):
        waiting = threading.Thread(target=second)
        waiting.start()
        assert asks.wait(10)
        waiting.join(0.2)
        assert waiting.is_alive()
        with alone(tmp_path, "another"):
            write_entry(tmp_path, "key", tensors, VALUES)
    waiting.join(10)
    assert found[0][1] == VALUES


def test_where_there_can_be_no_lock_there_is_none(tmp_path):
    (tmp_path / "file").touch()
    with alone(tmp_path / "file" / "folder", "key"), alone(tmp_path / "file" / "folder", "key"):
        pass
