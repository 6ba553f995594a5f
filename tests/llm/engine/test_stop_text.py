from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fullstride.llm.config import ModelConfig
from fullstride.llm.engine.sequence import Request, StopTextBuffer
from fullstride.llm.engine.shapes import CompiledShapes
from fullstride.llm.engine.validate import RequestValidator
from fullstride.llm.sampling_params import SamplingParams
from tests.llm.spm import make_words


class Letters:
    """Every token is a letter; 0 is half a character, which the next one completes."""

    def __init__(self):
        self.half = ""

    def push(self, ids):
        text = self.half + "".join("?" if i == 0 else chr(96 + i) for i in ids)
        self.half = "?" if text.endswith("?") else ""
        return text.removesuffix("?").replace("?", "")

    def flush(self):
        rest, self.half = self.half, ""
        return rest


def ids(text: str) -> list[int]:
    return [ord(letter) - 96 for letter in text]


def feed(text: StopTextBuffer, tokens: list[int], watch: bool = True) -> tuple[list[str], str | None]:
    parts = []
    for token in tokens:
        part, stop = text.push(token, watch)
        parts.append(part)
        if stop is not None:
            return parts, stop
    part, stop = text.flush(watch)
    return [*parts, part], stop


def test_text_that_may_begin_a_stop_is_held_back():
    parts, stop = feed(StopTextBuffer(Letters(), ["end"]), ids("aenbend"))
    assert parts == ["a", "", "", "enb", "", "", ""]
    assert stop == "end"


def test_what_no_stop_came_of_comes_at_the_end():
    assert feed(StopTextBuffer(Letters(), ["end"]), ids("xen")) == (["x", "", "", "en"], None)


def test_the_first_stop_wins_and_may_be_kept():
    assert feed(StopTextBuffer(Letters(), ["cd", "bc"]), ids("abcd")) == (["a", "", ""], "bc")
    assert feed(StopTextBuffer(Letters(), ["bc"], include=True), ids("abcd"))[0] == ["a", "", "bc"]


def test_a_stop_in_the_last_half_character_is_found():
    assert feed(StopTextBuffer(Letters(), ["?"]), [1, 0]) == (["a", "", ""], "?")


def test_too_early_nothing_is_looked_for():
    assert feed(StopTextBuffer(Letters(), ["b"]), ids("abc"), watch=False) == (["a", "b", "c", ""], None)


@given(st.text("ab", max_size=12), st.integers(0, 12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_stop_that_begins_too_early_ends_it_where_it_is_whole(letters, early, stops):
    early = min(early, len(letters))
    text = StopTextBuffer(Letters(), stops)
    first = "".join(text.push(token, watch=False)[0] for token in ids(letters[:early]))
    parts, stop = feed(text, ids(letters[early:]))
    ends = [(i, i - len(s)) for s in stops for i in range(early + 1, len(letters) + 1) if letters[:i].endswith(s)]
    if not ends:
        assert (first + "".join(parts), stop) == (letters, None)
        return
    assert stop is not None
    assert first + "".join(parts) == letters[: min(start for end, start in ends if end == min(ends)[0])]


def test_without_a_detokenizer_there_is_no_text():
    assert feed(StopTextBuffer(None), [1, 2]) == (["", "", ""], None)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_it_is_the_text_cut_at_the_first_stop(text, stops):
    parts, stop = feed(StopTextBuffer(Letters(), stops), ids(text))
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not ends:
        assert ("".join(parts), stop) == (text, None)
        return
    # It is found when its last letter comes; of several that end there, the earliest start cuts.
    assert stop is not None
    assert "".join(parts) == text[: min(start for end, start in ends if end == min(ends)[0])]
    assert all(a == "" or b is not None for a, b in pairwise(parts))


def test_a_completion_goes_on_where_its_prompt_ends():
    tokenizer, ids = make_words()
    prompt = [ids[piece] for piece in ("<s>", "▁The", "▁sky", "▁is")]
    request = Request("x", prompt, SamplingParams(), 9, ())
    model = ModelConfig("llama", tokenizer.vocab_size, 8, 8, 1, 1, 1, 8, 16)
    sizes = CompiledShapes(1, (1,), 1, (1,), (1,), 2, 1, 16, 1, 16, "float32", "float32")
    (sequence,) = RequestValidator(model, sizes, tokenizer).sequences(request)
    assert tokenizer.decode(prompt) + sequence.text.push(ids["▁blue"], True)[0] == "The sky is blue"
