import hashlib
import os
import random
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullstride.assets.cache import COMPUTED, age, entries, entry_kinds, foreign
from fullstride.assets.fetch import cache_folder, cache_path
from fullstride.assets.registry import ASSETS
from fullstride.bert.data.tokenizer import trained_once
from fullstride.cli.app import app
from fullstride.meanflow.metrics.reference import cache_key, cached
from fullstride.runs.lock import locked

PACKAGE = Path(__file__).parents[2] / "fullstride"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _write(file: Path, size: int = 1) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(random.randbytes(size))
    return file


def _cache(*args: str, answer: str = ""):
    return CliRunner().invoke(app, ["cache", *args], input=answer)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


def test_an_entry_has_the_size_of_its_files_and_the_age_of_the_newest(cache):
    sizes = [random.randrange(1, 10_000) for _ in range(3)]
    files = [_write(cache / "inductor" / str(i) / "code.py", size) for i, size in enumerate(sizes)]
    for file, days in zip(files, (5, 2, 9), strict=True):
        os.utime(file, (0, time.time() - days * 86_400 - 60))
    (entry,) = entries()
    assert (entry.name, entry.size, age(entry.changed)) == ("inductor", sum(sizes), "2 d")
    assert set(entry.files) == set(files)


def test_the_list_has_every_entry_and_the_total(cache):
    _write(cache / "xla" / "a-cache", 3_000)
    _write(cache_path("mnist5k"), 1_500)
    shown = _cache("list").stdout
    assert str(cache) in shown
    assert re.search(r"mnist5k.*1\.5 kB.*0 s.*fetched", shown)
    assert re.search(r"xla.*3\.0 kB", shown)
    assert re.search(r"total.*4\.5 kB", shown)


def test_an_empty_cache_is_said_to_be(cache):
    assert _cache("list").stdout == f"{cache}: no entries of fullstride\n"
    assert _cache("clear").stdout == f"{cache}: nothing to clear\n"


def test_without_a_folder_of_its_own_it_lies_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("FULLSTRIDE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _write(tmp_path / "fullstride" / "xla" / "a-cache")
    other = _write(tmp_path / "pip" / "xla" / "a-cache")
    assert _cache("list").stdout.splitlines()[0] == str(tmp_path / "fullstride")
    assert _cache("clear", "--yes").exit_code == 0
    assert _files(tmp_path) == {str(other.relative_to(tmp_path))}


def test_every_folder_that_is_written_to_has_its_row():
    """The writers are found in the sources, so that a new one is not forgotten."""
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert set(re.findall(r'cache_folder\(\) / "(\w+)"', source)) == set(COMPUTED)
    assert set(entry_kinds()) == set(COMPUTED) | {name.partition("/")[0] for name in ASSETS}


def test_the_page_names_every_entry():
    page = (PACKAGE.parent / "docs" / "reference" / "cache.md").read_text()
    assert [name for name in entry_kinds() if f"`{name}`" not in page] == []


def test_what_the_writers_write_is_cleared():
    trained_once(["a text of a few words"], "its fingerprint", 64)
    cached(cache_folder() / "reference", cache_key("made", 1), lambda: ({}, {"value": 1}))
    assert {entry.name for entry in entries()} == {"reference", "wordpiece"}
    assert _cache("clear", "--yes").exit_code == 0
    assert not list(cache_folder().iterdir())


def test_only_what_was_named_is_cleared_and_it_says_how_much_was_freed(cache):
    _write(cache / "xla" / "a-cache", 2_000)
    kernel = _write(cache / "ptx" / f"{hashlib.sha256(b'kernel').hexdigest()}.ptx", 5_000)
    done = _cache("clear", "xla", "--yes")
    assert done.stdout.splitlines()[-1] == "freed 2.0 kB"
    assert [entry.files for entry in entries()] == [(kernel,)]


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("n\n", 1), ("", 1)], ids=["yes", "no", "nothing"])
def test_nothing_is_removed_unless_the_answer_is_yes(cache, answer, left):
    _write(cache / "inductor" / "code.py")
    done = _cache("clear", answer=answer)
    assert (done.exit_code, len(entries())) == (left, left)


def test_an_unknown_entry_is_refused_with_the_names(cache):
    _write(cache / "inductor" / "code.py")
    done = _cache("clear", "inducto", "--yes")
    assert done.exit_code == 2
    assert "did you mean inductor?" in done.stderr
    assert len(entries()) == 1


def test_files_of_others_in_the_cache_folder_stay(cache):
    """FULLSTRIDE_CACHE may name a folder of data, with a cifar10 and a reference of the user's own."""
    own = ["cifar10/pictures/1.png", "reference/weights.safetensors", "reference/a.json", "ptx/other.ptx", "mine.txt"]
    for file in own:
        _write(cache / file)
    _write(cache_path("cifar10"))
    _write(cache / "reference" / f"{cache_key('made')}.json")
    assert _cache("clear", "--yes").exit_code == 0
    assert _files(cache) == set(own)
    assert foreign() == ["mine.txt"]
    assert "never cleared: mine.txt" in _cache("list").stdout


def test_links_are_removed_and_what_they_lead_to_stays(cache, tmp_path):
    outside = _write(tmp_path / "outside" / "data", 70)
    for link, target in {"inductor/file": outside, "inductor/folder": outside.parent, "xla": outside.parent}.items():
        (cache / link).parent.mkdir(parents=True, exist_ok=True)
        (cache / link).symlink_to(target)
    assert sum(entry.size for entry in entries()) == 0
    assert "xla" not in {entry.name for entry in entries() if len(entry.files) != 1}
    assert _cache("clear", "--yes").exit_code == 0
    assert _files(cache) == set()
    assert outside.read_bytes()


def test_a_cache_that_is_a_link_is_cleared_where_it_leads(cache, tmp_path):
    cache.symlink_to(tmp_path / "disk")
    _write(tmp_path / "disk" / "xla" / "a-cache")
    assert _cache("clear", "--yes").exit_code == 0
    assert cache.is_symlink()
    assert not _files(tmp_path / "disk")


def test_while_a_download_is_in_progress_nothing_is_removed(cache):
    half, kernel = _write(cache / ".part-a" / "half"), _write(cache / "inductor" / "code.py")
    with locked(half.parent):
        assert "a download in progress" in _cache("list").stdout
        done = _cache("clear", "inductor", "--yes")
        assert done.exit_code == 2
        assert "a download is in progress" in done.stderr
    assert half.exists()
    assert kernel.exists()


def test_what_an_ended_download_left_is_cleared(cache):
    _write(cache / ".part-a" / "folder" / "half")
    assert "left by an interrupted download" in _cache("list").stdout
    assert _cache("clear", "--yes").exit_code == 0
    assert not list(cache.iterdir())
