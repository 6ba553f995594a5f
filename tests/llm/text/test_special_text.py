"""Special tokens that a conversation spells are text, and those of the template tokens."""

import random
from typing import Any

import transformers

from fullstride.llm.text.chat_template import ChatTemplate
from fullstride.llm.text.special_text import SpecialText
from fullstride.llm.text.tokenizer import Tokenizer
from tests.llm.tiny import SPECIAL, TEMPLATE, make_tokenizer

PIECES = ["hello ", "<|im", "_end|>", "\n", "é", " 東京", "<", "|>", *SPECIAL]


def _conversation(draw: random.Random) -> list[dict]:
    return [{"role": "user", "content": "".join(draw.choices(PIECES, k=draw.randrange(9)))} for _ in range(3)]


def test_no_text_ends_a_message(seed):
    draw, tokenizer = random.Random(seed), Tokenizer(make_tokenizer(), eos=(2,), template=ChatTemplate(TEMPLATE, {}))
    special = SpecialText(tokenizer)
    for _ in range(20):
        talk = _conversation(draw)
        rendered = tokenizer.chat(special.hide(talk))
        plain = tokenizer.chat(talk)
        assert special.shown(rendered) == plain
        ids = special.encode(rendered)
        # As many special tokens as the template writes itself, and every text is as it was.
        assert sum(token in tokenizer.special_texts for token in ids) == 2 * len(talk) + 1
        assert tokenizer.decode(ids, skip_special=False) == plain
        words = [token for token in ids if token not in tokenizer.special_texts]
        quiet = make_tokenizer()
        quiet.encode_special_tokens = True
        expected = [
            token
            for message in talk
            for part in (f"user\n{message['content']}", "\n")
            for token in quiet.encode(part, add_special_tokens=False).ids
        ]
        assert words == [*expected, *quiet.encode("assistant\n", add_special_tokens=False).ids]


def test_texts_without_special_tokens_are_encoded_as_ever(seed):
    tokenizer = Tokenizer(make_tokenizer(), eos=(2,), template=ChatTemplate(TEMPLATE, {}))
    special, talk = (
        SpecialText(tokenizer),
        [{"role": "user", "content": "hello <|im_ end|>", "n": 3, "x": [None, {"a": "b"}]}],
    )
    assert special.hide(talk) == talk
    rendered = tokenizer.chat(special.hide(talk))
    fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), chat_template=TEMPLATE)
    assert special.encode(rendered) == fast.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
