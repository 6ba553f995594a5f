"""Qwen2 and Qwen2.5, and DeepSeek-R1's distillations into them."""

from fullstride.llm.families.family import Family, PreTokenizer

FAMILY = Family(
    gguf="qwen2",
    qkv_bias=True,
    tensors={f"self_attn.{name}_proj.bias": f"{name}_bias" for name in "qkv"},
    gguf_tensors={f"attn_{name}.bias": f"{name}_bias" for name in "qkv"},
    words={"qwen2": PreTokenizer(digits="", composed=True), "deepseek-r1-qwen": PreTokenizer(digits="")},
    ends=("<|im_end|>", "<|endoftext|>"),
)
