import math

import pytest

from fullstride.llm.outputs import Delta, Logprob
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.server.completions import CompletionAnswer
from fullstride.llm.server.job import Prompt
from fullstride.llm.server.logprobs import CompletionLogprobsWriter, chat_logprobs, token_text
from fullstride.llm.server.schemas.completion import CompletionRequest
from fullstride.llm.server.served import Served
from tests.llm.spm import make_words

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


@pytest.mark.parametrize("echo", [True, False])
def test_offsets_count_no_space_that_the_text_has_not(echo):
    tokenizer, ids = make_words()
    prompt = [ids[piece] for piece in ("<s>", "▁The", "▁sky")]
    served = Served(("words",), tokenizer, 99)
    body = CompletionRequest.model_validate({"prompt": "The sky", "echo": echo, "logprobs": 0})
    answer = CompletionAnswer(served, body, [Prompt(prompt, SamplingParams())])
    said = [(Logprob(ids[piece], -1.0, 1),) for piece in ("▁is", "▁blue")]
    places = (None, *((Logprob(token, -1.0, 1),) for token in prompt[1:])) if echo else None
    delta = Delta("x", text=" is blue", token_ids=(1, 2), logprobs=tuple(said), prompt_logprobs=places)
    (choice,) = answer.chunks(0, delta)
    assert choice["text"] == ("The sky is blue" if echo else " is blue")
    assert choice["logprobs"]["text_offset"] == ([0, 0, 3, 7, 10] if echo else [0, 3])


def test_a_chosen_token_is_among_the_probable_ones_once():
    writer = CompletionLogprobsWriter(TABLE.__getitem__, ())
    chosen, best = Logprob(0, -3.0, 7), Logprob(3, -0.1, 1)
    assert writer.write([(chosen, best)], 0)["top_logprobs"] == [{"<end>": -0.1, "a": -3.0}]
    assert writer.write([(best, best)], 0)["top_logprobs"] == [{"<end>": -0.1}]
