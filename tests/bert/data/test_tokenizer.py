import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import AutoTokenizer, BertTokenizer

from fullstride.bert.data.corpus import Corpus
from fullstride.bert.data.rows import rows_of
from fullstride.bert.data.tokenizer import (
    SPECIALS,
    from_vocabulary,
    minilm,
    read_tokenizer,
    save_tokenizer,
    trained,
    trained_once,
)
from fullstride.bert.model.bert import Bert
from fullstride.bert.model.config import BertConfig
from fullstride.bert.model.fill import fill
from fullstride.errors import ConfigError
from tests.bert.data.texts import corpus, tokenizer

TRAIN = """
import sys
from fullstride.bert.data.tokenizer import trained
from tests.bert.data.texts import corpus
sys.stdout.write(trained(list(corpus().entries), 90).to_str())
"""


def test_every_process_trains_the_same():
    # The library's own order of continuations differs from process to process.
    command = [sys.executable, "-c", TRAIN]
    made = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)}
    assert made == {tokenizer().to_str()}


def test_it_knows_every_word_it_was_trained_on_and_gives_it_back():
    vocabulary = tokenizer().get_vocab()
    assert len(vocabulary) == 90
    assert [vocabulary[name] for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [0, 1, 2, 3, 4]
    for entry in corpus().entries[:20]:
        encoding = tokenizer().encode(entry.upper())
        assert "[UNK]" not in encoding.tokens
        assert tokenizer().decode(encoding.ids).replace(" .", ".") == entry.lower()
        assert (encoding.tokens[0], encoding.tokens[-1]) == ("[CLS]", "[SEP]")


def test_a_vocabulary_below_the_alphabet_is_refused():
    with pytest.raises(ConfigError, match="vocab_size=20: expected at least"):
        trained(list(corpus().entries), 20)


def test_a_trained_one_is_kept(monkeypatch):
    texts = list(corpus().entries)
    first = trained_once(texts, "made", 70)
    monkeypatch.setattr("fullstride.bert.data.tokenizer.trained", None)
    assert trained_once(texts, "made", 70).to_str() == first.to_str()


@pytest.mark.parametrize("left", [0, 200])
def test_a_kept_one_that_is_damaged_is_trained_anew(monkeypatch, tmp_path, capfd, left):
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path))
    texts = list(corpus().entries)
    first = trained_once(texts, "made", 70).to_str()
    (file,) = (tmp_path / "wordpiece").iterdir()
    file.write_text(file.read_text()[:left])
    assert trained_once(texts, "made", 70).to_str() == first == file.read_text()
    assert f"{file}: cannot be read" in capfd.readouterr().err


def test_a_cache_that_cannot_be_written_costs_the_copy_alone(monkeypatch, tmp_path, capfd):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path / "file"))
    found = trained_once(list(corpus().entries), "made", 90)
    assert found.to_str() == tokenizer().to_str()
    assert "not cached" in capfd.readouterr().err


def test_transformers_reads_what_is_saved(tmp_path):
    save_tokenizer(tokenizer(), tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for entry in corpus().entries[:5]:
        assert theirs(entry)["input_ids"] == tokenizer().encode(entry).ids
    assert theirs.mask_token_id == tokenizer().token_to_id("[MASK]")
    for folder_or_file in (tmp_path, tmp_path / "vocab.txt"):
        assert read_tokenizer(folder_or_file).encode("Bade [MASK]").ids == tokenizer().encode("Bade [MASK]").ids


def _users(path: Path, *registered: AddedToken | str) -> Tokenizer:
    """A WordPiece as the library alone makes one: no special tokens around a text, and those registered that are given.

    The five stand at the end of its vocabulary, so that their numbers are not BERT's.
    """
    tokens = sorted(tokenizer().get_vocab(), key=lambda token: (token in SPECIALS, token))
    made = Tokenizer(WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    made.add_special_tokens(list(registered))
    made.save(str(path))
    return made


@pytest.mark.parametrize("registered", [(), SPECIALS, (AddedToken("[MASK]", lstrip=True, special=True), "[PAD]")])
def test_a_users_tokenizer_is_completed_and_trains_as_it_did(tmp_path, registered):
    theirs = _users(tmp_path / "tokenizer.json", *registered)
    found = read_tokenizer(tmp_path)
    known = found.get_added_tokens_decoder().values()
    assert sorted(token.content for token in known if token.special) == sorted(SPECIALS)
    assert [token.lstrip for token in known if token.content == "[MASK]"] == [len(registered) == 2]
    assert found.get_vocab() == theirs.get_vocab()
    word = corpus().entries[0].split()[0]
    inner = theirs.encode(word).ids
    first, last, mask = (theirs.token_to_id(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
    assert found.encode(f"{word} [MASK] {word}").ids == [first, *inner, mask, *inner, last]
    assert found.decode(found.encode(word).ids) == word
    # Brackets in a text that is trained on are no special tokens.
    texts = Corpus("texts", (*corpus().entries, f"{word} [MASK] [SEP]{word}[CLS] [mask]", "[PAD]"))
    ours, as_before = (rows_of(texts, each, 16) for each in (found, theirs))
    np.testing.assert_array_equal(ours.tokens, as_before.tokens)
    np.testing.assert_array_equal(ours.segments, as_before.segments)
    # As a run keeps it, and goes on with it.
    (tmp_path / "run").mkdir()
    save_tokenizer(found, tmp_path / "run")
    assert read_tokenizer(tmp_path / "run" / "tokenizer.json").to_str() == found.to_str()


def test_fill_keeps_the_text_of_a_users_tokenizer(tmp_path):
    _users(tmp_path / "tokenizer.json")
    found = read_tokenizer(tmp_path)
    model = Bert(BertConfig.named("tiny", vocab_size=found.get_vocab_size(), max_length=64), key=jax.random.key(0))
    first, *_, last = corpus().entries[0].removesuffix(".").split()
    ((best,),) = fill(model, found, f"{first} [MASK] {last}", 1)
    said = best.token.removeprefix("##")
    assert best.text.replace(" ", "") == first + said + last


def test_what_is_no_wordpiece_of_berts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json or vocab\.txt"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tokenizer(tmp_path)
    model = {"type": "BPE", "vocab": {}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(ConfigError, match="model BPE; expected WordPiece or byte-level BPE"):
        read_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    with pytest.raises(ConfigError, match=r"no \[MASK\]"):
        from_vocabulary(tmp_path / "vocab.txt")
    with pytest.raises(ConfigError, match="cannot be read"):
        from_vocabulary(tmp_path / "none.txt")


def test_only_a_line_feed_ends_a_token_of_a_vocabulary(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "\u2028", "b", "\x85", "c"]
    for end in ("\n", ""):
        (tmp_path / "vocab.txt").write_text("\n".join(tokens) + end, encoding="utf-8")
        found = read_tokenizer(tmp_path)
        assert found.get_vocab() == {token: i for i, token in enumerate(tokens)}
        assert found.encode("a b c", add_special_tokens=False).ids == [5, 7, 9]


def test_a_cased_vocabulary_keeps_its_case(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Paris", "paris"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    assert read_tokenizer(tmp_path).encode("Paris").tokens[1] == "paris"
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    for path in (tmp_path, tmp_path / "vocab.txt"):
        assert read_tokenizer(path).encode("Paris").tokens[1] == "Paris"
    save_tokenizer(read_tokenizer(tmp_path), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert read_tokenizer(tmp_path).encode("Paris").tokens[1] == "Paris"
    for wrong in ("[]", "{", '{"do_lower_case": "no"}', '{"strip_accents": 1}', '{"tokenize_chinese_chars": null}'):
        (tmp_path / "tokenizer_config.json").write_text(wrong)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: .*expected"):
            read_tokenizer(tmp_path)


LETTERS = ["a", "o", "u", "ä", "ö", "ü", "e", "é", "中", "文", "A", "Ö", "wör", "1", "-"]
WORDS = ["wörter Äpfel", "Wörter für e\u0301", "中文ao", "a-\u4e2d\u6587-o", "ÖA é", "\ufeffa\u00ado\u200bu"]
WORDS += ["a" * 101 + " ä", "ẞ İ ǅ", "", " \t\r\n"]


@pytest.mark.parametrize(
    "treatment",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"do_lower_case": True, "strip_accents": None},
        {"tokenize_chinese_chars": False},
    ],
    ids=str,
)
def test_accents_case_and_chinese_are_treated_as_transformers_treats_them(tmp_path, treatment, seed):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"} | treatment))
    rng = np.random.default_rng(seed)
    # Letters with and without accents, marks that stand alone, spaces of all kinds, Chinese, full-width forms.
    ranges = [(32, 127), (0xA0, 0x250), (0x300, 0x370), (0x2000, 0x2070), (0x4E00, 0x4E30), (0xFF00, 0xFF60)]
    drawn = ["".join(chr(rng.integers(*ranges[rng.integers(6)])) for _ in range(12)) for _ in range(100)]
    theirs, ours, out = BertTokenizer.from_pretrained(tmp_path), read_tokenizer(tmp_path), tmp_path / "out"
    out.mkdir()
    save_tokenizer(ours, out)
    again = BertTokenizer.from_pretrained(out)
    (out / "tokenizer.json").unlink()
    of_vocabulary = read_tokenizer(out)
    for text in WORDS + drawn:
        expected = theirs(text)["input_ids"]
        assert ours.encode(text).ids == of_vocabulary.encode(text).ids == again(text)["input_ids"] == expected, text


def test_a_line_that_comes_twice_moves_no_other_one(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "a", "c"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    found = read_tokenizer(tmp_path)
    assert found.encode("a b c", add_special_tokens=False).ids == [7, 6, 8]  # the later one, as in transformers
    save_tokenizer(found, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert read_tokenizer(tmp_path).encode("a b c", add_special_tokens=False).ids == [7, 6, 8]


def test_minilms_is_that_of_its_own_file():
    try:
        ours = minilm()
    except ConfigError as error:
        pytest.skip(str(error))
    assert ours.get_vocab_size() == 30_522
    assert ours.encode("Unaffable Réne [MASK] 北京!").tokens == [
        "[CLS]", "una", "##ffa", "##ble", "rene", "[MASK]", "北", "京", "!", "[SEP]",
    ]  # fmt: skip
