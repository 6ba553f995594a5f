"""Llama, and models with the same layers, such as SmolLM2."""

from fullstride.llm.families.family import Family
from fullstride.llm.families.words import PreTokenizer, plain_words

LLAMA3 = PreTokenizer(plain_words("{1,3}"), ignore_merges=True, begins=True)

FAMILY = Family(
    gguf="llama",
    interleaved=True,
    words={"smollm": PreTokenizer(single_digits=True), **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), LLAMA3)},
    ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
)
