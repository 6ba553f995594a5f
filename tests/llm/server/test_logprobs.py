import math

from fullstride.llm.outputs import Logprob
from fullstride.llm.server.logprobs import CompletionLogprobsWriter, chat_logprobs, token_text

TABLE = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"<end>"}


def test_parts_of_characters_differ():
    assert [token_text(TABLE[i]) for i in range(4)] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<end>"]


def test_what_is_impossible_is_a_number_that_json_has():
    place = (Logprob(0, -math.inf, 9), Logprob(1, -0.25, 1))
    (entry,) = (chat_logprobs([place], TABLE.__getitem__) or {})["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -0.25)
    assert chat_logprobs(None, TABLE.__getitem__) is None


def test_offsets_go_on_from_piece_to_piece():
    writer = CompletionLogprobsWriter(TABLE.__getitem__, {3})
    places = [(Logprob(token, -1.0, 1),) for token in (1, 2, 3, 0)]
    assert writer.write([None], 3, "<end>")["text_offset"] == [0]
    assert [writer.write([place], 3)["text_offset"][0] for place in places] == [5, 5, 6, 6]


def test_a_chosen_token_is_among_the_probable_ones_once():
    writer = CompletionLogprobsWriter(TABLE.__getitem__, ())
    chosen, best = Logprob(0, -3.0, 7), Logprob(3, -0.1, 1)
    assert writer.write([(chosen, best)], 0)["top_logprobs"] == [{"<end>": -0.1, "a": -3.0}]
    assert writer.write([(best, best)], 0)["top_logprobs"] == [{"<end>": -0.1}]
