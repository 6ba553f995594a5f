import pytest

from fullstride.bert.data import catalogue, gcide, hugging_face
from fullstride.bert.data.catalogue import corpus_of, data_of, held_out_of, tokenizer_of
from fullstride.bert.data.corpus import Corpus
from fullstride.bert.data.tokenizer import trained
from fullstride.bert.training.settings import DataSettings
from fullstride.errors import ConfigError
from tests.bert.data.texts import corpus, tokenizer


@pytest.fixture
def lines(tmp_path) -> DataSettings:
    path = tmp_path / "made.txt"
    path.write_text("\n".join(corpus().entries))
    return DataSettings("text_files", str(path), "line", vocab_size=90, length=24, holdout=0.3)


def test_every_name_reads_its_own_texts_with_its_own_settings(monkeypatch, lines):
    for module in (gcide, hugging_face):
        monkeypatch.setattr(module, "load", lambda *given: Corpus("asked", tuple(map(str, given))))
    assert corpus_of(DataSettings("gcide")).entries == ("None",)
    assert corpus_of(DataSettings("gcide", "there")).entries == ("there",)
    given = DataSettings("hf_dataset", "wiki:en", split="test", column="body")
    assert corpus_of(given).entries == ("wiki:en", "test", "body")
    assert corpus_of(lines).entries == corpus().entries
    with pytest.raises(ConfigError, match="data=python_docs reads this Python's own files; use data=text_files"):
        corpus_of(DataSettings(path="books"))


def test_a_runs_own_tokenizer_comes_before_a_named_and_that_before_a_trained_one(monkeypatch, tmp_path, lines):
    other = trained(list(corpus().entries), 70)
    monkeypatch.setattr(catalogue, "minilm", lambda: other)
    own = tmp_path / "tokenizer.json"
    tokenizer().save(str(own))
    named = DataSettings(tokenizer="minilm")
    assert tokenizer_of(named, corpus(), own).to_str() == tokenizer().to_str()
    assert tokenizer_of(named, corpus()) is other
    assert tokenizer_of(DataSettings(tokenizer=str(own)), corpus()).to_str() == tokenizer().to_str()
    assert tokenizer_of(lines, corpus()).get_vocab_size() == 90


def test_nothing_held_out_is_trained_on_and_scores_need_no_training_rows(lines):
    data = data_of(lines, 0)
    alone = held_out_of(lines, 0, data.tokenizer)
    assert (alone.rows.tokens == data.held_out.rows.tokens).all()
    held = corpus_of(lines).split(0.3)[1]
    assert alone.size == data.held_out.size == held.size()
    some = held_out_of(lines, 100, data.tokenizer)
    assert 100 <= some.size < alone.size
    assert some.rows.count() < alone.rows.count()


def test_texts_without_a_token_are_refused(tmp_path):
    path = tmp_path / "control.txt"
    path.write_text("\x01\n\x02\n\x03")
    with pytest.raises(ConfigError, match="data=text_files: the texts to train on have no token"):
        data_of(DataSettings("text_files", str(path), "line", tokenizer="", vocab_size=10), 0)
