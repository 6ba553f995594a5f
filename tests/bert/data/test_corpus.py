import pytest

from fullstride.bert.data.corpus import Corpus
from fullstride.errors import ConfigError
from tests.bert.data.texts import corpus


def test_a_split_is_one_by_content_and_loses_nothing():
    whole = corpus(100)
    train, held = whole.split(0.2)
    assert len(held.entries) == 20
    assert set(train.entries) | set(held.entries) == set(whole.entries)
    assert not set(train.entries) & set(held.entries)
    shuffled = Corpus("made", whole.entries[::-1])
    assert set(shuffled.split(0.2)[1].entries) == set(held.entries)


def test_equal_entries_are_on_one_side():
    train, held = Corpus("twice", tuple(corpus(30).entries) * 2).split(0.5)
    assert not set(train.entries) & set(held.entries)
    assert len(held.entries) == 30


@pytest.mark.parametrize("share", [1e-9, 0.999])
def test_each_side_has_an_entry(share):
    train, held = Corpus("two", ("a", "b")).split(share)
    assert len(train.entries) == len(held.entries) == 1


def test_one_text_cannot_be_held_out_and_trained_on():
    with pytest.raises(ConfigError, match="1 distinct texts.*data.separator=blank_line"):
        Corpus("text_files", ("a", "a")).split(0.1)


def test_a_sample_is_a_first_part_and_sizes_are_bytes():
    whole = Corpus("é", ("éé", "abc", "d"))
    assert whole.size() == 8
    assert whole.sample(5).entries == ("éé", "abc")
    assert whole.sample(0).entries == whole.entries


def test_a_fingerprint_tells_texts_apart():
    prints = {Corpus("x", entries).fingerprint for entries in (("ab", "c"), ("a", "bc"), ("c", "ab"), ("ab", "c", ""))}
    assert len(prints) == 4
    assert Corpus("y", ("ab", "c")).fingerprint in prints
