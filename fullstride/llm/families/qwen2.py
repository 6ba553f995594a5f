"""Qwen2 and Qwen2.5, and DeepSeek-R1's distillations into them."""

from fullstride.llm.families.family import Family
from fullstride.llm.families.words import PreTokenizer, plain_words

FAMILY = Family(
    gguf="qwen2",
    qkv_bias=True,
    tensors={f"self_attn.{name}_proj.bias": f"{name}_bias" for name in "qkv"},
    gguf_tensors={f"attn_{name}.bias": f"{name}_bias" for name in "qkv"},
    words={"qwen2": PreTokenizer(plain_words(""), composed=True), "deepseek-r1-qwen": PreTokenizer(plain_words(""))},
    ends=("<|im_end|>", "<|endoftext|>"),
)
