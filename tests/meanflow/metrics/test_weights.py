import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

from fullstride.errors import ConfigError
from fullstride.meanflow.metrics.weights import first_line, load_weights, read_weights, weights_sha256
from fullstride.runs.atomic_files import file_sha256


@pytest.mark.parametrize("new_format", [False, True])
def test_tensors_come_back(tmp_path, new_format):
    state = {"a": torch.randn(3), "b.c": torch.randn(2, 2)}
    torch.save(state, tmp_path / "w.pth", _use_new_zipfile_serialization=new_format)
    read = read_weights(tmp_path / "w.pth", "others")
    assert read.keys() == state.keys()
    assert all(torch.equal(read[k], state[k]) for k in state)


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"\x80\x02K", bytes(100)])
def test_what_is_no_file_of_weights_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "w.pth"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="w.pth: not a file of weights .*; expected w of p$") as error:
        read_weights(path, "w of p")
    assert "\n" not in str(error.value)


def test_code_in_a_file_is_not_run(tmp_path):
    class Malicious:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"a": Malicious()}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="not a file of weights"):
        read_weights(tmp_path / "w.pth", "w")
    assert not (tmp_path / "ran").exists()


def test_other_things_and_no_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="none.pth: no such file; expected w of p"):
        read_weights(tmp_path / "none.pth", "w of p")
    for other in ([torch.zeros(2)], {"a": 1}):
        torch.save(other, tmp_path / "w.pth")
        with pytest.raises(ConfigError, match="holds more than a dictionary of tensors"):
            read_weights(tmp_path / "w.pth", "w of p")


def test_only_the_networks_own_tensors_are_loaded():
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    load_weights(model, other.state_dict(), Path("w"), "w of p")
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(ConfigError, match=r"w: 1 tensors .* more of shape \(2,\) instead of none; expected w of p"):
        load_weights(model, other.state_dict() | {"more": torch.zeros(2)}, Path("w"), "w of p")


def test_hashes_depend_on_all_there_is(tmp_path):
    (tmp_path / "w").write_bytes(b"abc")
    assert file_sha256(tmp_path / "w") == hashlib.sha256(b"abc").hexdigest()
    state = {"a": torch.arange(4.0), "b": torch.zeros(2)}
    assert weights_sha256(dict(reversed(state.items()))) == weights_sha256(state)
    others = [
        {"a": torch.arange(4.0) + 1e-6, "b": torch.zeros(2)},
        {"a": torch.arange(4.0).reshape(2, 2), "b": torch.zeros(2)},
        {"a": torch.arange(4.0), "b": torch.zeros(2, dtype=torch.int32)},
        {"a": torch.arange(4.0), "c": torch.zeros(2)},
    ]
    assert len({weights_sha256(s) for s in [state, *others]}) == 5


def test_an_error_without_words_has_its_name():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(EOFError()) == "EOFError"
