import numpy as np
import pytest

from fullstride.bert.data.batch import in_turn, mask_tokens, predictions, word_starts
from fullstride.bert.data.rows import rows_of
from tests.bert.data.texts import corpus, tokenizer

ROWS = rows_of(corpus(400), tokenizer(), 50)


@pytest.mark.parametrize("fraction", [0.15, 0.4, 0.5])
def test_each_row_predicts_its_share_of_its_own_tokens(fraction):
    batch = mask_tokens(ROWS, np.random.default_rng(0), fraction)
    counts = batch.counted.sum(1)
    assert batch.masked.shape[1] == predictions(50, fraction)
    np.testing.assert_array_equal(counts, np.maximum(1, np.rint(fraction * ROWS.hideable.sum(1))))
    for row in range(len(ROWS)):
        places = batch.masked[row][batch.counted[row]]
        assert len(set(places)) == len(places)
        assert ROWS.hideable[row, places].all()
        np.testing.assert_array_equal(ROWS.tokens[row, places], batch.labels[row][batch.counted[row]])
        untouched = np.setdiff1d(np.arange(50), places)
        np.testing.assert_array_equal(batch.tokens[row, untouched], ROWS.tokens[row, untouched])


def test_80_percent_are_hidden_10_replaced_10_left():
    shown, labels = [], []
    for seed in range(20):
        batch = mask_tokens(ROWS, np.random.default_rng(seed))
        at = batch.tokens[np.arange(len(ROWS))[:, None], batch.masked]
        shown.append(at[batch.counted])
        labels.append(batch.labels[batch.counted])
    shown, labels = np.concatenate(shown), np.concatenate(labels)
    hidden = shown == ROWS.vocabulary.mask
    ordinary = len(ROWS.vocabulary.ordinary)
    spread = 5 * np.sqrt(0.25 / len(shown))
    assert hidden.mean() == pytest.approx(0.8, abs=spread)
    # A random token may be the same one.
    assert (shown == labels).mean() == pytest.approx(0.1 + 0.1 / ordinary, abs=spread)
    replaced = shown[~hidden & (shown != labels)]
    assert set(replaced) == set(ROWS.vocabulary.ordinary)


def test_all_tokens_are_as_likely_to_be_chosen():
    chosen = np.zeros(ROWS.tokens.shape)
    for seed in range(300):
        batch = mask_tokens(ROWS, np.random.default_rng(seed))
        np.add.at(chosen, (np.arange(len(ROWS))[:, None], batch.masked), batch.counted)
    share = (chosen / 300)[ROWS.hideable]
    assert (chosen[~ROWS.hideable] == 0).all()
    assert share.mean() == pytest.approx(0.15, abs=0.01)
    assert share.max() < 0.15 + 6 * np.sqrt(0.15 * 0.85 / 300)


def test_whole_words_are_hidden_whole(seed):
    batch = mask_tokens(ROWS, np.random.default_rng(seed), whole_words=True)
    inside = ROWS.vocabulary.inside
    several = 0
    for row in range(len(ROWS)):
        places = set(batch.masked[row][batch.counted[row]].tolist())
        assert len(places) == batch.counted[row].sum()
        for place in places:
            begin = place
            while inside[ROWS.tokens[row, begin]] and ROWS.hideable[row, begin - 1]:
                begin -= 1
            end = place + 1
            while end < 50 and inside[ROWS.tokens[row, end]]:
                end += 1
            assert set(range(begin, end)) <= places
            assert word_starts(ROWS)[row, place] == begin
            several += end - begin > 1
    assert several > 20
    wanted = np.maximum(1, np.rint(0.15 * ROWS.hideable.sum(1)))
    assert (batch.counted.sum(1) <= wanted).all()
    assert batch.counted.sum() > 0.95 * wanted.sum()


@pytest.mark.parametrize("fraction", [0.15, 0.4])
def test_words_are_taken_in_a_random_order_while_they_fit(fraction, seed):
    batch = mask_tokens(ROWS, np.random.default_rng(seed), fraction, whole_words=True)
    scores, starts = np.random.default_rng(seed).random(ROWS.tokens.shape, np.float32), word_starts(ROWS)
    for row in range(len(ROWS)):
        words: dict[int, list[int]] = {}
        for place in np.flatnonzero(ROWS.hideable[row]):
            words.setdefault(int(starts[row, place]), []).append(int(place))
        left, taken = max(1, round(fraction * ROWS.hideable[row].sum())), set()
        for begin in sorted(words, key=lambda begin, row=row: scores[row, begin]):
            # One that is too long is passed over, as in BERT's create_pretraining_data.py.
            if len(words[begin]) <= left:
                left -= len(words[begin])
                taken |= set(words[begin])
        assert set(batch.masked[row][batch.counted[row]].tolist()) == taken


def test_in_turn_each_token_is_hidden_once_and_nothing_else_changes(seed):
    hidden = np.zeros(ROWS.tokens.shape, int)
    batches = list(in_turn(ROWS, np.random.default_rng(seed)))
    assert len(batches) == 7
    for batch in batches:
        rows = np.broadcast_to(np.arange(len(ROWS))[:, None], batch.masked.shape)[batch.counted]
        places = batch.masked[batch.counted]
        np.add.at(hidden, (rows, places), 1)
        assert (batch.tokens[rows, places] == ROWS.vocabulary.mask).all()
        np.testing.assert_array_equal(batch.labels[batch.counted], ROWS.tokens[rows, places])
        assert (batch.tokens != ROWS.tokens).sum() == batch.counted.sum()
        share = batch.counted.sum(1) - ROWS.hideable.sum(1) / 7
        assert (np.abs(share) < 1).all()
    np.testing.assert_array_equal(hidden, ROWS.hideable)


def test_rows_of_one_text_say_how_long_they_are():
    alone = rows_of(corpus(), tokenizer(), 50, pack=False)
    batch = mask_tokens(alone, np.random.default_rng(0))
    assert batch.segments is None
    assert batch.lengths is not None
    for tokens, length in zip(batch.tokens, batch.lengths, strict=True):
        assert (tokens[length:] == alone.vocabulary.pad).all()
        assert tokens[length - 1] == alone.vocabulary.last
    packed = mask_tokens(ROWS, np.random.default_rng(0))
    assert packed.lengths is None
    np.testing.assert_array_equal(packed.segments, ROWS.segments)
