import json
import shutil
import threading
import time
from itertools import cycle

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import Structured
from fullstride.llm.text.gguf_tokenizer import read_tokenizer
from fullstride.llm.text.grammar import Compiler
from fullstride.llm.text.tokenizer import Detokenizer, Tokenizer
from fullstride.llm.text.tokenizer_folder import read_folder
from tests.llm import spm
from tests.llm.tiny import SPECIAL, TEXTS, make_tokenizer


def _sentence_piece() -> Tokenizer:
    tokens, scores, kinds = spm.make_vocabulary()
    own = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "eos_token_id": 2}
    return read_tokenizer(spm.NOWHERE, {f"tokenizer.ggml.{key}": value for key, value in own.items()})


BYTE_LEVEL = Tokenizer(make_tokenizer(), eos=(2,), bos=0)
TOKENIZERS = {"byte-level": BYTE_LEVEL, "sentencepiece": _sentence_piece()}
TEXT = st.one_of(st.text(max_size=30), st.sampled_from(TEXTS), st.text("👩‍🚀東京é aᚠ▁\ufffd", max_size=20))


# Texts, noise, and both in turn.
PARTS = st.lists(st.one_of(TEXT, st.lists(st.integers(0, 10**6), max_size=12)), max_size=4)


def _ids(tokenizer: Tokenizer, parts: list) -> list[int]:
    known = tokenizer.vocab_size
    lists = (tokenizer.encode(x) if isinstance(x, str) else [token % known for token in x] for x in parts)
    return [token for ids in lists for token in ids]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(parts=PARTS, skip=st.booleans(), sizes=st.lists(st.integers(1, 5), min_size=1))
def test_text_in_any_pieces_is_the_text_as_a_whole(name, parts, skip, sizes):
    tokenizer = TOKENIZERS[name]
    ids = _ids(tokenizer, parts)
    whole = tokenizer.decode(ids, skip_special=skip)
    detokenizer, text, size = Detokenizer(tokenizer, skip), "", cycle(sizes)
    while ids:
        count = next(size)
        text += detokenizer.push(ids[:count])
        ids = ids[count:]
        assert whole.startswith(text)
    assert text + detokenizer.flush() == whole


@given(parts=PARTS, skip=st.booleans())
def test_byte_level_ids_are_decoded_as_by_the_library(parts, skip):
    ids = _ids(BYTE_LEVEL, parts)
    assert BYTE_LEVEL.decode(ids, skip) == BYTE_LEVEL.backend.decode(ids, skip_special_tokens=skip)


@given(text=TEXT)
def test_sentencepiece_texts_are_decoded_as_by_the_library(text):
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


def test_no_half_character_leaves_the_detokenizer():
    astronaut = BYTE_LEVEL.encode("👩‍🚀!")
    assert len(astronaut) > 6
    detokenizer = Detokenizer(BYTE_LEVEL)
    pushed = [detokenizer.push([token]) for token in astronaut]
    assert "".join(pushed) == "👩‍🚀!"
    assert {len(text) for text in pushed} == {0, 1}
    half = Detokenizer(BYTE_LEVEL)
    assert half.push(astronaut[:2]) == ""
    assert half.flush() == "\ufffd"


def test_the_space_after_a_prompt_stays():
    tokenizer, ids = spm.make_words()
    said = [ids["<s>"], *(ids[f"▁{word}"] for word in ("The", "sky", "is", "blue"))]
    for cut, text in ((1, "The sky is blue"), (2, " sky is blue"), (4, " blue")):
        detokenizer = Detokenizer(tokenizer, after=said[:cut])
        assert detokenizer.push(said[cut:]) + detokenizer.flush() == text
        assert tokenizer.decode(said[:cut]) + text == "The sky is blue"
        stream = decoders.DecodeStream(ids=said[:cut], skip_special_tokens=True)
        assert "".join(stream.step(tokenizer.backend, token) or "" for token in said[cut:]) == text


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_character_that_the_prompt_began_is_the_completions(cut):
    ids = BYTE_LEVEL.encode("é京🎉", special=False)
    assert len(ids) >= 7  # cuts within characters
    after, said = ids[:cut], ids[cut:]
    prompt = Detokenizer(BYTE_LEVEL).push(after)
    detokenizer = Detokenizer(BYTE_LEVEL, after=after)
    completion = detokenizer.push(said) + detokenizer.flush()
    assert prompt + completion == "é京🎉"
    stream = decoders.DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(BYTE_LEVEL.backend, token) or "" for token in ids]
    assert completion == "".join(pieces[cut:])


def test_half_a_character_that_the_completion_does_not_go_on_with_is_the_prompts():
    (half, *rest), mark = BYTE_LEVEL.encode("京", special=False), BYTE_LEVEL.encode("<|im_end|>")
    for after, said, text in (([half], "x", "x"), ([half], "é", "é"), ([half, *mark], "x", "x"), ([half], "", "")):
        detokenizer = Detokenizer(BYTE_LEVEL, after=after)
        assert detokenizer.push(mark + BYTE_LEVEL.encode(said)) + detokenizer.flush() == text
    # What it has gone on with, and not ended, is its own.
    detokenizer = Detokenizer(BYTE_LEVEL, after=[half])
    assert detokenizer.push(rest[:1]) + detokenizer.flush() == "\ufffd"


def test_each_token_is_looked_up_once_however_long_the_text():
    class Counted(list):
        lookups = 0

        def __getitem__(self, at):
            self.lookups += 1
            return super().__getitem__(at)

    tokenizer = Tokenizer(make_tokenizer())
    table = Counted(tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
    vars(tokenizer)["_bytes"] = table
    detokenizer = Detokenizer(tokenizer)
    for _ in range(500):
        detokenizer.push([17, 19, 300])
    assert table.lookups == 1500


def test_ids_of_no_token_are_replaced():
    assert BYTE_LEVEL.of_model(400, (2,)).decode([399]) == ""
    assert BYTE_LEVEL.decode([10**6, -1]) == "\ufffd\ufffd"


@pytest.mark.parametrize("kind", ["tiny_qwen3", "tiny_llama"])
def test_a_folder_is_read_as_transformers_reads_it(kind, request):
    folder = request.getfixturevalue(kind)
    ours, theirs = read_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in (*TEXTS, "<|im_start|>user\nHi<|im_end|>"):
        assert ours.encode(text) == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ours.encode(text), skip) == theirs.decode(theirs.encode(text), skip_special_tokens=skip)
    talk = [{"role": "user", "content": "Hi"}]
    assert ours.chat(talk) == theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert (ours.bos, ours.eos) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert ours.special_texts.keys() == set(theirs.all_special_ids) | {1}


def test_bytes_of_tokens_are_those_of_the_text():
    for name, tokenizer in TOKENIZERS.items():
        ids = tokenizer.encode("naïve 東京", special=False)
        prefix = b"" if name == "byte-level" else b" "
        assert b"".join(map(tokenizer.token_bytes, ids)) == prefix + "naïve 東京".encode()
    assert BYTE_LEVEL.token_bytes(2) == b"<|im_end|>"
    with pytest.raises(IndexError):
        BYTE_LEVEL.token_bytes(320)


def test_older_folders(tiny_llama, tmp_path):
    """Templates by name, special tokens as objects, added tokens that tokenizer.json lacks."""
    folder = shutil.copytree(tiny_llama, tmp_path / "old")
    (folder / "chat_template.jinja").unlink()
    token = {"content": "<|extra|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    config = {
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "bos_token": None,
        "chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}],
        "added_tokens_decoder": {"320": token | {"single_word": False}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|endoftext|>"}))
    tokenizer = read_folder(folder)
    assert (tokenizer.eos, tokenizer.bos) == ((2,), None)
    assert tokenizer.encode("<|extra|>") == [320]
    assert 320 in tokenizer.special_texts
    assert (tokenizer.chat([]), tokenizer.chat([], tools=[{}])) == ("plain", "tools")


def test_what_is_no_tokenizer(tiny_llama, tmp_path):
    with pytest.raises(ConfigError, match="tokenizer.json: not found"):
        read_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json: not a tokenizer"):
        read_folder(tmp_path)
    shutil.copy(tiny_llama / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object, got list"):
        read_folder(tmp_path)


def test_a_decoder_without_bytes_is_refused():
    backend = make_tokenizer()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="decoder is WordPiece; expected ByteLevel"):
        Tokenizer(backend).decode([5])


def test_an_added_token_that_is_written_with_a_space():
    backend = make_tokenizer()
    backend.add_tokens([AddedToken("<a b>", special=False)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.vocab_size == 321
    assert tokenizer.decode(tokenizer.encode("x<a b>y")) == "x<a b>y"
    assert SPECIAL[2] not in tokenizer.decode([2])


def test_other_threads_go_on_while_a_long_text_is_encoded():
    tokenizer, text = Tokenizer(make_tokenizer()), "the quick brown fox naïve 東京 " * 15_000
    seen: list[float] = []
    going = threading.Event()

    def notice() -> None:
        while not going.wait(0.001):
            seen.append(time.perf_counter())

    thread = threading.Thread(target=notice)
    thread.start()
    began = time.perf_counter()
    ids = tokenizer.encode(text)
    ended = time.perf_counter()
    going.set()
    thread.join()
    assert tokenizer.decode(ids) == text
    # Were Python's lock held, there would be one at its beginning and one at its end.
    assert sum(began < moment < ended for moment in seen) > 5


def test_special_tokens_may_be_a_part_of_texts():
    tokenizer = Tokenizer(make_tokenizer(), eos=(2,))
    shown = tokenizer.showing(("<|im_start|>",)).of_model(344, (2,))
    ids = tokenizer.encode("a<|im_start|>b<|im_end|>", special=False)
    assert (tokenizer.decode(ids), shown.decode(ids)) == ("ab", "a<|im_start|>b")
    assert (1 in tokenizer.special_texts, 1 in shown.special_texts) == (True, False)
    matcher = Compiler(shown).matcher(Structured("regex", r"a<\|im_start\|>b"))
    assert all(map(matcher.advance, ids))
