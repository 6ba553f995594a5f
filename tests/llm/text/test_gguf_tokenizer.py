import inspect
import json

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter

from fullstride.errors import ConfigError
from fullstride.llm.text.gguf_tokenizer import PRE, read_tokenizer
from fullstride.llm.weights import load
from tests.llm import spm
from tests.llm.tiny import SPECIAL, TEXTS, make_tokenizer

# What tokenizers cut differently: digits, contractions, spaces and line ends, marks, letters of two characters.
PIECES = [
    "a",
    "b",
    "X",
    "é",
    "e\u0301",
    "東",
    "🎉",
    "'",
    "'s",
    "'LL",
    "0",
    "12",
    "345",
    " ",
    "  ",
    "\n",
    "\r",
    "\t",
    ".",
    "--",
    "!",
]
TEXT = st.one_of(
    st.lists(st.sampled_from([*PIECES, *SPECIAL]), max_size=12).map("".join),
    st.text(max_size=40),
    st.sampled_from(TEXTS),
)
VOCABULARY = spm.make_vocabulary()


def _metadata(pre: str | None, **more) -> dict:
    state = json.loads(make_tokenizer().to_str())
    vocabulary = make_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    own = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if text in SPECIAL else 1 for text in tokens],
        "merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (own | more).items()}


def _spm(**more) -> dict:
    tokens, scores, kinds = VOCABULARY
    own = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    own |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {f"tokenizer.ggml.{key}": value for key, value in (own | more).items()}


BYTE_LEVEL = {pre: read_tokenizer(spm.NOWHERE, _metadata(pre)) for pre in PRE}
QWEN2 = transformers.Qwen2Tokenizer(
    vocab={text: token for token, text in enumerate(_metadata("qwen2")["tokenizer.ggml.tokens"])},
    merges=[tuple(merge.split(" ")) for merge in _metadata("qwen2")["tokenizer.ggml.merges"]],  # pyright: ignore
    additional_special_tokens=list(SPECIAL),
)
LLAMA3_PATTERN = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
LLAMA3_WORDS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
SENTENCE_PIECE = read_tokenizer(spm.NOWHERE, _spm(add_bos_token=False))


@pytest.mark.parametrize("pre", PRE)
@given(text=TEXT)
def test_a_text_comes_back(pre, text):
    tokenizer = BYTE_LEVEL[pre]
    ids = tokenizer.encode(text, special=False)
    composed = tokenizer.backend.normalizer.normalize_str(text) if pre == "qwen2" else text
    assert tokenizer.decode(ids, skip_special=False) == composed


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "a 123's  b", ["a", "Ġ123", "'s", "Ġ", "Ġb"]),
        ("smollm", "a 123's  b", ["a", "Ġ", "1", "2", "3", "'s", "Ġ", "Ġb"]),
        ("qwen2", "a 123's!\n\n b", ["a", "Ġ", "1", "2", "3", "'s", "!ĊĊ", "Ġb"]),
        ("llama-bpe", "a 12345'S!\n\n b", ["a", "Ġ", "123", "45", "'S", "!ĊĊ", "Ġb"]),
        ("gpt-4o", "aBc 12345 it'S!/\n b", ["a", "Bc", "Ġ", "123", "45", "Ġit'S", "!/Ċ", "Ġb"]),
        ("tekken", "aBC 12 it's!/\n b", ["a", "BC", "Ġ", "1", "2", "Ġit", "'s", "!/Ċ", "Ġb"]),
    ],
)
def test_words_are_cut_as_the_model_was_trained(pre, text, words):
    assert [word for word, _ in BYTE_LEVEL[pre].backend.pre_tokenizer.pre_tokenize_str(text)] == words


@given(text=TEXT)
def test_qwen_encodes_as_in_transformers(text):
    assert BYTE_LEVEL["qwen2"].encode(text) == QWEN2.encode(text)


@given(text=TEXT)
def test_llama3_cuts_words_as_in_transformers(text):
    ours = BYTE_LEVEL["llama-bpe"].backend.pre_tokenizer.pre_tokenize_str(text)
    assert ours == LLAMA3_WORDS.pre_tokenize_str(text)


@pytest.fixture(scope="module")
def gpt4o():
    """OpenAI's own cutting of texts, with the tiny vocabulary in place of the one that would be fetched."""
    tiktoken, own = pytest.importorskip("tiktoken"), pytest.importorskip("tiktoken_ext.openai_public")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "load_tiktoken_bpe", lambda *_, **__: {})
        pattern = own.o200k_base()["pat_str"]
    ranks = {BYTE_LEVEL["gpt-4o"].token_bytes(token): token for token in range(len(SPECIAL), 320)}
    return tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


@given(text=TEXT.filter(lambda text: "<" not in text))
def test_gpt4o_encodes_as_in_tiktoken(gpt4o, text):
    assert BYTE_LEVEL["gpt-4o"].encode(text) == gpt4o.encode_ordinary(text)


@given(text=TEXT.filter(lambda text: text and "<" not in text))
def test_sentencepiece_merges_as_sentencepiece_does(text):
    tokens, scores, _ = VOCABULARY
    ids = SENTENCE_PIECE.encode(text)
    assert ids == spm.encode(text, tokens, scores)
    assert SENTENCE_PIECE.decode(ids) == text


def test_the_first_token_is_put_where_the_model_wants_it():
    def first(metadata: dict) -> int:
        return read_tokenizer(spm.NOWHERE, metadata).encode("The")[0]

    plain = BYTE_LEVEL["gpt-2"].encode("The")[0]
    assert plain != 0
    assert [first(_metadata(pre)) for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe")] == [plain, plain, plain, 0]
    assert first(_metadata("llama-bpe", add_bos_token=False)) == plain
    assert first(_metadata("gpt-2", add_bos_token=True)) == 0
    assert first(_spm()) == 1
    assert read_tokenizer(spm.NOWHERE, _spm()).encode("The", special=False)[0] > 258


def test_ends_are_those_that_are_named_and_those_that_end_a_turn():
    assert BYTE_LEVEL["smollm"].eos == (2, 0)
    assert read_tokenizer(spm.NOWHERE, _metadata("gpt-2", eot_token_id=7)).eos == (2, 7, 0)
    assert SENTENCE_PIECE.eos == (2,)


def test_without_a_space_before_the_first_word():
    tokenizer = read_tokenizer(spm.NOWHERE, _spm(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.decode(tokenizer.encode("dog")) == "dog"
    assert tokenizer.decode(tokenizer.encode(" dog")) == " dog"
    assert tokenizer.encode("dog") != SENTENCE_PIECE.encode("dog")


def test_tokens_that_only_pad_are_no_text():
    metadata = _metadata("gpt-2")
    metadata["tokenizer.ggml.tokens"] += ["[PAD320]", "dog\u0120"]
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    tokenizer = read_tokenizer(spm.NOWHERE, metadata).of_model(322, (2,))
    assert tokenizer.token_bytes(320) == tokenizer.token_bytes(321) == b""


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "tokenizer.ggml.model=None: expected one of gpt2, llama"),
        ({"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": []}, "tokenizer.ggml.model=t5"),
        ({"tokenizer.ggml.model": [], "tokenizer.ggml.tokens": []}, r"tokenizer.ggml.model=\[\]: expected one of"),
        (_metadata("gpt-2", eot_token_id="x"), "tokenizer.ggml.eot_token_id='x': expected a token id"),
        (_metadata("gpt-2", eom_token_id=[1.5]), r"tokenizer.ggml.eom_token_id=\[1.5\]: expected a token id"),
        (_metadata("viking"), "tokenizer.ggml.pre=viking: expected one of gpt-2, smollm, llama-bpe"),
        (_metadata(None), "tokenizer.ggml.pre=None: expected one of"),
        (_metadata("gpt-2", merges=["nothing known"]), "its tokenizer is damaged: .*out of vocabulary"),
        (_metadata("gpt-2", token_type=[1]), "its tokenizer is damaged"),
        (_spm(scores=None), "needs tokenizer.ggml.scores"),
    ],
)
def test_what_is_no_tokenizer(metadata, message):
    with pytest.raises(ConfigError, match=message):
        read_tokenizer(spm.NOWHERE, metadata)


@pytest.mark.thorough
def test_smollm2_encodes_as_in_transformers(smollm2):
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    ours = load(smollm2).tokenizer
    for text in (*TEXTS, "x1234567 's\n\n  y\t", "<|im_start|>user\nHi<|im_end|>", "".join(PIECES)):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, special=False) == ids
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
    talk = [{"role": "user", "content": "What is the capital of France?"}]
    assert ours.chat(talk) == theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
