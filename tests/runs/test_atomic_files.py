import errno
import io
import os
import sys

import pytest

from fullstride.errors import ConfigError
from fullstride.runs import atomic_files as files
from fullstride.runs.atomic_files import note, read_best_effort, replace_file


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    replace_file(path, "old")
    replace_file(path, b"new \xff")
    assert path.read_bytes() == b"new \xff"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_full_disk_leaves_what_was_there_and_is_told_with_the_files_name(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    replace_file(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*a\.json \(No space left on device\)"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_is_not_there_is_told_with_the_files_name(tmp_path):
    with pytest.raises(OSError, match=r"cannot write .*none/a\.json \(No such file"):
        replace_file(tmp_path / "none" / "a.json", "text")


@pytest.mark.parametrize("content", [b"", b'{"samplers": {"meanfl', b"[1, 2]", b"3", b'{"a": "\xff"}'])
def test_what_was_copied_in_part_is_told_with_the_files_name(tmp_path, content):
    path = tmp_path / "scores.json"
    path.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"^\S*scores\.json: incomplete or damaged \(.+\); copy it again, or delete it$"
    ):
        read_best_effort(path)
    path.write_text('{"samplers": {"a": 1}}')
    assert read_best_effort(path) == {"samplers": {"a": 1}}


def test_a_note_that_cannot_be_written_costs_nothing(monkeypatch, capfd):
    note("seen")
    assert capfd.readouterr().err == "seen\n"

    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stderr", Full())
    note("lost")
