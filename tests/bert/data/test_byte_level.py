"""Byte-level BPE: RoBERTa's and ModernBERT's tokenizers, with either one's special tokens."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from fullstride.bert.data.batch import mask_tokens, word_starts
from fullstride.bert.data.corpus import Corpus
from fullstride.bert.data.rows import Vocabulary, rows_of
from fullstride.bert.data.tokenizer import ROBERTA_SPECIALS, SPECIALS, read_tokenizer, save_tokenizer
from fullstride.bert.model.config import BertConfig
from fullstride.bert.training.build import check_fits
from fullstride.errors import ConfigError
from tests.bert.data.texts import corpus


@pytest.fixture(scope="module", params=[ROBERTA_SPECIALS, SPECIALS], ids=["roberta", "modernbert"])
def theirs(request) -> Tokenizer:
    """A tokenizer whose hidden token takes the space before it, and whose padding is not token 0."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    pad, *others, mask = request.param
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = [others[0], pad, *others[1:], AddedToken(mask, lstrip=True, special=True)]
    made.train_from_iterator(
        corpus().entries,
        trainers.BpeTrainer(vocab_size=330, special_tokens=names, initial_alphabet=alphabet, show_progress=False),
    )
    return made


def test_it_is_read_completed_and_written_for_transformers(theirs, tmp_path):
    theirs.save(str(tmp_path / "tokenizer.json"))
    found = read_tokenizer(tmp_path)
    vocabulary, text = Vocabulary.of(found), "Dé bade 北京, kilo"
    inner = theirs.encode(text).ids
    assert found.encode(text).ids == [vocabulary.first, *inner, vocabulary.last]
    assert found.decode(inner) == text
    (tmp_path / "out").mkdir()
    save_tokenizer(found, tmp_path / "out")
    assert not (tmp_path / "out" / "vocab.txt").exists()
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    mask = ROBERTA_SPECIALS[-1] if "<mask>" in found.get_vocab() else SPECIALS[-1]
    assert again(f"bade {mask} kilo")["input_ids"] == found.encode(f"bade {mask} kilo").ids
    assert (again.pad_token_id, again.mask_token_id) == (vocabulary.pad, vocabulary.mask) == (1, 4)


def test_rows_hold_each_text_and_hide_whole_words(theirs, tmp_path, seed):
    theirs.save(str(tmp_path / "tokenizer.json"))
    rows = rows_of(Corpus("x", corpus().entries[:20]), read_tokenizer(tmp_path), 40)
    assert ((rows.tokens == 1) == (rows.segments == 0)).all()
    ends = np.isin(rows.tokens, (rows.vocabulary.first, rows.vocabulary.last))
    assert ((rows.segments > 0) & ~ends == rows.hideable).all()
    # A word begins with its space, or a text.
    begins = np.array([theirs.id_to_token(i).startswith("\u0120") for i in rows.tokens.ravel()]).reshape(ends.shape)
    begins[:, 1:] |= ends[:, :-1]
    starts = word_starts(rows)
    place = np.arange(40)[None]
    assert ((starts == place) == begins)[rows.hideable].all()
    batch = mask_tokens(rows, np.random.default_rng(seed), whole_words=True)
    hidden = np.zeros(rows.tokens.shape, bool)
    hidden[np.nonzero(batch.counted)[0], batch.masked[batch.counted]] = True
    assert hidden.any()
    assert (np.take_along_axis(hidden, starts, 1) == hidden)[rows.hideable].all()


def test_positions_after_another_padding_token_are_refused(theirs):
    config = BertConfig(vocab_size=400, family="roberta", padding=3)
    with pytest.raises(ConfigError, match="init: its positions begin after padding token 3, the tokenizer's is 1; set"):
        check_fits(config, Vocabulary.of(theirs), 9, "init")
