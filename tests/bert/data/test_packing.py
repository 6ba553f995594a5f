import numpy as np
import pytest

from fullstride.bert.data.corpus import Corpus
from fullstride.bert.data.rows import encoded, pack_rows, rows_of
from fullstride.errors import ConfigError
from tests.bert.data.texts import corpus, tokenizer


def texts_in(rows) -> list[tuple[int, ...]]:
    """Texts between the ends of each segment, read token by token."""
    found, vocabulary = [], rows.vocabulary
    for tokens, segments in zip(rows.tokens, rows.segments, strict=True):
        for number in range(1, segments.max() + 1):
            text = tokens[segments == number]
            assert (text[0], text[-1]) == (vocabulary.first, vocabulary.last)
            found.append(tuple(text[1:-1].tolist()))
        assert (tokens[segments == 0] == vocabulary.pad).all()
        steps = np.diff(np.append(segments, 0))
        assert ((steps == 0) | (steps == 1) | (np.append(segments[1:], 0) == 0)).all()
    return found


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("length", [3, 17, 64])
def test_every_token_is_in_a_row_once(length, pack):
    texts = [tuple(tokenizer().encode(e, add_special_tokens=False).ids) for e in corpus().entries]
    rows = rows_of(corpus(), tokenizer(), length, pack=pack)
    pieces = texts_in(rows)
    expected = []
    for text in texts:
        count = -(-len(text) // (length - 2))
        expected += [text[len(text) * i // count : len(text) * (i + 1) // count] for i in range(count)]
    assert sorted(pieces) == sorted(expected)
    assert rows.count() == sum(map(len, texts))
    assert max(map(len, pieces)) <= length - 2
    if not pack:
        assert len(rows) == len(pieces)
        assert rows.segments.max() == 1


@pytest.mark.parametrize("seed", range(5))
def test_packing_fills_rows(seed):
    sizes = np.random.default_rng(seed).integers(1, 65, 500)
    order, row = pack_rows(sizes, 64)
    assert sorted(order) == list(range(500))
    loads = np.bincount(row, sizes[order])
    assert loads.max() <= 64
    assert (np.diff(row) >= 0).all()
    # Best fit by falling size needs at most 11/9 of the fewest rows, and one (Johnson et al., 1974).
    assert len(loads) <= 11 / 9 * -(-sizes.sum() // 64) + 1
    assert len(loads) < 0.8 * len(sizes)


def test_special_tokens_in_a_text_are_its_words():
    tokens, counts = encoded(Corpus("x", ("[MASK] ba [SEP]", "de")), tokenizer())
    specials = {tokenizer().token_to_id(name) for name in ("[MASK]", "[SEP]", "[CLS]", "[PAD]")}
    assert not specials & set(tokens.tolist())
    assert counts.sum() == len(tokens)
    assert tokenizer().encode("[MASK]", add_special_tokens=False).tokens == ["[MASK]"]


def test_rows_without_room_are_refused():
    with pytest.raises(ConfigError, match="data.length=2"):
        rows_of(corpus(), tokenizer(), 2)
    assert len(rows_of(Corpus("empty", ("", " ")), tokenizer(), 8)) == 0
