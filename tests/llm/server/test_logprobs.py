import math
import random

import pytest

from fullstride.llm.outputs import Delta, Logprob
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.server.completions import CompletionAnswer
from fullstride.llm.server.job import EnginePrompt
from fullstride.llm.server.logprobs import CompletionLogprobsWriter, chat_logprobs, token_text
from fullstride.llm.server.schemas.completion import CompletionRequest
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.text.tokenizer import Tokenizer
from fullstride.llm.text.utf8_stream import TextPrefix
from tests.llm.spm import make_words
from tests.llm.tiny import make_tokenizer

TABLE = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"<end>"}


def test_parts_of_characters_differ():
    assert [token_text(TABLE[i]) for i in range(4)] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<end>"]


def test_what_is_impossible_is_a_number_that_json_has():
    place = (Logprob(0, -math.inf, 9), Logprob(1, -0.25, 1))
    (entry,) = (chat_logprobs([place], TABLE.__getitem__) or {})["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -0.25)
    assert chat_logprobs(None, TABLE.__getitem__) is None


def test_offsets_go_on_from_piece_to_piece():
    writer = CompletionLogprobsWriter(TABLE.__getitem__, {3: "<end>"}, TextPrefix(strips=False))
    places = [(Logprob(token, -1.0, 1),) for token in (1, 2, 3, 0)]
    assert writer.write([None], 3, "<end>")["text_offset"] == [0]
    assert [writer.write([place], 3)["text_offset"][0] for place in places] == [5, 5, 6, 6]


def test_offsets_behind_a_mark_that_cuts_a_character_off():
    writer = CompletionLogprobsWriter(TABLE.__getitem__, {3: "<end>"}, TextPrefix(strips=False))
    places = [None, *((Logprob(token, -1.0, 1),) for token in (3, 0, 0))]
    assert writer.write(places, 1, "\ufffd<end>aa")["text_offset"] == [0, 0, 6, 7]


@pytest.mark.parametrize("mark", ["<é>", "<é", "<Ã©>", "<東é>", "<Āx>"])
def test_offsets_of_a_mark_whose_bytes_are_no_text(mark, seed):
    backend, draw = make_tokenizer(), random.Random(seed)
    backend.add_special_tokens([mark])
    number = backend.token_to_id(mark)
    assert number is not None
    tokenizer = Tokenizer(backend, eos=(2,))
    words = ["".join(draw.choices("abcde ", k=3)) for _ in range(3)]
    ids = tokenizer.encode(mark.join(words), special=False)
    for given in (mark.join(words), ids):
        body = CompletionRequest.model_validate({"prompt": given, "echo": True, "logprobs": 0, "max_tokens": 0})
        answer = CompletionAnswer(ServedModel(("tiny",), tokenizer, 99), body, [EnginePrompt(ids, SamplingParams())])
        places = (None, *((Logprob(token, -1.0, 1),) for token in ids[1:]))
        (choice,) = answer.chunks(0, Delta("x", text="", token_ids=(), logprobs=(), prompt_logprobs=places))
        written = mark if isinstance(given, str) else tokenizer.decode([number], False)
        assert choice["text"] == written.join(words)
        offsets, at = choice["logprobs"]["text_offset"], [i for i, token in enumerate(ids) if token >= 320]
        # Where the mark ends in half a character, that is counted with the token behind it.
        half = written.endswith("\ufffd")
        starts = [len(words[0]), len(words[0]) + len(written) + len(words[1])]
        assert [offsets[i] for i in at] == starts
        assert [offsets[i + 1] for i in at] == [start + len(written) - half for start in starts]


@pytest.mark.parametrize("echo", [True, False])
def test_offsets_count_no_space_that_the_text_has_not(echo):
    tokenizer, ids = make_words()
    prompt = [ids[piece] for piece in ("<s>", "▁The", "▁sky")]
    served = ServedModel(("words",), tokenizer, 99)
    body = CompletionRequest.model_validate({"prompt": "The sky", "echo": echo, "logprobs": 0})
    answer = CompletionAnswer(served, body, [EnginePrompt(prompt, SamplingParams())])
    said = [(Logprob(ids[piece], -1.0, 1),) for piece in ("▁is", "▁blue")]
    places = (None, *((Logprob(token, -1.0, 1),) for token in prompt[1:])) if echo else None
    delta = Delta("x", text=" is blue", token_ids=(1, 2), logprobs=tuple(said), prompt_logprobs=places)
    (choice,) = answer.chunks(0, delta)
    assert choice["text"] == ("The sky is blue" if echo else " is blue")
    assert choice["logprobs"]["text_offset"] == ([0, 0, 3, 7, 10] if echo else [0, 3])


@pytest.mark.parametrize(("echo", "most"), [(True, 5), (False, 5), (True, 0)])
def test_a_character_is_written_once_though_the_prompt_has_half_of_it(echo, most):
    tokenizer = Tokenizer(make_tokenizer(), eos=(2,))
    ids = tokenizer.encode("a京b", special=False)
    assert len(ids) >= 4
    prompt, said = ids[:2], ids[2:]
    served = ServedModel(("tiny",), tokenizer, 99)
    body = CompletionRequest.model_validate({"prompt": prompt, "echo": echo, "logprobs": 0, "max_tokens": most})
    answer = CompletionAnswer(served, body, [EnginePrompt(prompt, SamplingParams())])
    before = (None, (Logprob(prompt[1], -1.0, 1),)) if echo else None
    places = tuple((Logprob(token, -1.0, 1),) for token in said)
    (choice,) = answer.chunks(0, Delta("x", text="京b", token_ids=tuple(said), logprobs=places, prompt_logprobs=before))
    assert choice["text"] == {(True, 5): "a京b", (False, 5): "京b", (True, 0): "a\ufffd"}[echo, most]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[-1] == (1 if most == 0 else len(choice["text"]) - 1)
    assert len(offsets) == {(True, 5): len(ids), (False, 5): len(said), (True, 0): 2}[echo, most]


def test_half_a_character_that_the_completion_leaves_stays_the_prompts():
    tokenizer = Tokenizer(make_tokenizer(), eos=(2,))
    prompt, said = tokenizer.encode("a京", special=False)[:2], tokenizer.encode("b", special=False)
    body = CompletionRequest.model_validate({"prompt": prompt, "echo": True})
    answer = CompletionAnswer(ServedModel(("tiny",), tokenizer, 99), body, [EnginePrompt(prompt, SamplingParams())])
    (choice,) = answer.chunks(0, Delta("x", text="b", token_ids=tuple(said)))
    assert choice["text"] == "a\ufffdb" == tokenizer.decode(prompt + said)


def test_a_chosen_token_is_among_the_probable_ones_once():
    writer = CompletionLogprobsWriter(TABLE.__getitem__, {}, TextPrefix(strips=False))
    chosen, best = Logprob(0, -3.0, 7), Logprob(3, -0.1, 1)
    assert writer.write([(chosen, best)], 0)["top_logprobs"] == [{"<end>": -0.1, "a": -3.0}]
    assert writer.write([(best, best)], 0)["top_logprobs"] == [{"<end>": -0.1}]
