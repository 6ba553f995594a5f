import gzip
import hashlib
import sys
import types
from dataclasses import replace
from typing import Any

import pytest

from fullstride.assets import fetch as assets
from fullstride.assets.registry import ASSETS
from fullstride.bert.data import gcide, hugging_face, python_docs, text_files
from fullstride.bert.data.python_docs import paragraphs
from fullstride.errors import ConfigError


def test_prose_is_kept_and_code_is_not():
    text = """Return the *first* ``item`` of :class:`list`
        or raise an error.

        >>> first([1, 2, 3])
        1

        .. note:: a directive of many words that is no prose

        +----+----+ some table with many words in it
        x = some_call(with, many, arguments) and more words follow here
        """
    assert paragraphs(text) == ["Return the first item of list or raise an error."]
    assert paragraphs("too few words") == []


def test_the_standard_library_has_a_corpus_and_it_is_kept():
    corpus = python_docs.load()
    assert corpus.size() > 1_000_000
    assert len(set(corpus.entries)) == len(corpus.entries)
    text = "\n".join(corpus.entries)
    assert ">>>" not in text
    assert "Returns a new subclass of tuple with named fields." in text
    assert python_docs.load() == corpus


@pytest.mark.parametrize("cache", ["damaged", "closed"])
def test_a_cache_that_is_no_good_costs_the_copy_alone(monkeypatch, tmp_path, capfd, cache):
    """A file stands where its folder would be, which keeps root out, too."""
    place = tmp_path / "file" if cache == "closed" else tmp_path
    (tmp_path / "file").touch()
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(place))
    monkeypatch.setattr(python_docs, "_topics", list)
    monkeypatch.setattr(python_docs, "docstrings", lambda root: iter(["some prose", "more of it", "some prose"]))
    monkeypatch.setattr(python_docs, "paragraphs", lambda text: [text])
    python_docs.load()
    for kept in tmp_path.glob("python_docs/*"):
        kept.write_text('["some pro')
    assert python_docs.load().entries == ("some prose", "more of it")
    told = {"damaged": "creating it again", "closed": "set FULLSTRIDE_CACHE to a writable folder"}
    assert told[cache] in capfd.readouterr().err


def test_docstrings_of_every_kind_are_found_and_other_files_passed_over(tmp_path):
    (tmp_path / "a.py").write_text('"""Module."""\nclass A:\n    """Class."""\n    async def f():\n        "Method."\n')
    (tmp_path / "b.py").write_text("def broken(:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text('"""Test."""\n')
    assert list(python_docs.docstrings(tmp_path)) == ["Module.", "Class.", "Method."]


DICTIONARY = """00-database-info
This is the description.

A \\A\\ (named [=a] in the English), the
   first letter of the alphabet.
   [1913 Webster]

   Syn: alpha
        [WordNet 1.5 +PJC]

Ab \\Ab\\ ([a^]b), n. The fifth month.
"""
ENTRIES = [
    "A \\A\\ (named [=a] in the English), the first letter of the alphabet. Syn: alpha",
    "Ab \\Ab\\ ([a^]b), n. The fifth month.",
]


@pytest.mark.parametrize("packed", [True, False])
def test_the_dictionary_is_read_packed_or_not(tmp_path, monkeypatch, packed):
    content = DICTIONARY.encode()
    made = replace(ASSETS["gcide"], sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(ASSETS, "gcide", made)
    (tmp_path / made.file).write_bytes(gzip.compress(content) if packed else content)
    assert list(gcide.load(tmp_path).entries) == ENTRIES


def test_where_the_dictionary_is_not_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "DEBIAN_ROOT", tmp_path)
    with pytest.raises(ConfigError, match=r"apt-get install dict-gcide.*or give its folder as data\.path=FOLDER"):
        gcide.load()
    with pytest.raises(ConfigError, match=r"expected the file from usr/share/dictd/gcide\.dict\.dz of the Debian"):
        gcide.load(tmp_path)


@pytest.fixture
def books(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("zweite\nZeile\n\n\nÄpfel", encoding="utf-8")
    (tmp_path / "a.txt").write_text("erste")
    (tmp_path / "deep" / "c.txt").write_text("dritte\n")
    (tmp_path / "note.md").write_text("# note")
    return tmp_path


def test_files_folders_and_patterns_are_read_in_order_each_once(books):
    everything = f"{books}/note.md, {books}, {books}/a*"
    assert text_files.load(everything).entries == ("# note", "erste", "zweite\nZeile\n\n\nÄpfel", "dritte")
    assert text_files.load(str(books / "b.txt"), "blank_line").entries == ("zweite\nZeile", "Äpfel")
    assert text_files.load(f"{books}/**/?.txt", "line").entries == ("erste", "zweite", "Zeile", "Äpfel", "dritte")


def test_a_name_may_hold_a_comma(books):
    (books / "deep").rename(books / "old, and new")
    assert text_files.load(str(books / "old, and new")).entries == ("dritte",)
    with pytest.raises(ConfigError, match=r"old: no such file or folder"):
        text_files.load(f"{books}/old, and newer")
    long = ", ".join(f"{books}/{name}.txt" for name in "ab" * 500)
    assert text_files.load(long).entries == ("erste", "zweite\nZeile\n\n\nÄpfel")


def test_what_editors_put_in_front_and_at_the_ends_of_lines_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffeins\r\n\r\nzwei\r\n".encode())
    (tmp_path / "b.txt").write_bytes(b"eins\n\nzwei\n")
    of_windows, plain = (text_files.load(str(tmp_path / f"{name}.txt"), "blank_line") for name in "ab")
    assert of_windows == plain
    (tmp_path / "a.txt").write_bytes("\ufeff".encode())
    with pytest.raises(ConfigError, match="no text in 1 files"):
        text_files.load(str(tmp_path / "a.txt"))


def test_what_is_no_text_is_named(books):
    (books / "latin.txt").write_bytes("Käse".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.txt: not UTF-8 \(byte 1 is 0xe4\)"):
        text_files.load(str(books))
    for path, reason in {
        "": "expected data.path=FILES",
        str(books / "d*"): "no file of this pattern",
        str(books / "none.txt"): "no such file",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            text_files.load(path)
    (books / "empty").mkdir()
    with pytest.raises(ConfigError, match="no .*txt in this folder"):
        text_files.load(str(books / "empty"))
    (books / "empty" / "e.txt").write_text(" \n")
    with pytest.raises(ConfigError, match="no text in 1 files"):
        text_files.load(str(books / "empty"))
    with pytest.raises(ConfigError, match=r"data.separator=page: expected one of"):
        text_files.load(str(books), "page")


class Records:
    column_names = ("text", "label")

    def __getitem__(self, column):
        return {"text": [" one ", "", None, "two"], "label": [0, 1, 2, 3]}[column]


@pytest.fixture
def library(monkeypatch):
    """A stand-in for the package `datasets`, with what of it is used."""
    asked = []
    module: Any = types.ModuleType("datasets")

    def load_dataset(name, configuration=None, *, split):
        asked.append((name, configuration, split))
        if name == "absent":
            raise FileNotFoundError("Couldn't find\nany data file")
        return Records()

    module.load_dataset = load_dataset
    module.load_from_disk = lambda path: {"train": Records()}
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_a_data_sets_column_is_read(library, tmp_path):
    assert hugging_face.load("wikitext:wikitext-2-raw-v1", "test").entries == ("one", "two")
    assert library == [("wikitext", "wikitext-2-raw-v1", "test")]
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert hugging_face.load(str(tmp_path)).entries == ("one", "two")


def test_a_data_sets_mistakes_are_one_line(library, monkeypatch):
    with pytest.raises(ConfigError, match=r"datasets cannot load split train \(Couldn't find any data file\)"):
        hugging_face.load("absent")
    with pytest.raises(ConfigError, match="data.column=body: expected one of text, label"):
        hugging_face.load("there", column="body")
    with pytest.raises(ConfigError, match="data.column=label: holds int; expected text"):
        hugging_face.load("there", column="label")
    with pytest.raises(ConfigError, match=r"expected data\.path=NAME"):
        hugging_face.load("")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        hugging_face.load("there")
