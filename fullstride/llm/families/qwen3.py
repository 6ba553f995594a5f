"""Qwen3, whose tokenizer is Qwen2's."""

from fullstride.llm.families.family import Family

FAMILY = Family(
    gguf="qwen3",
    qk_norm=True,
    tensors={f"self_attn.{name}_norm.weight": f"{name}_norm" for name in "qk"},
    gguf_tensors={f"attn_{name}_norm.weight": f"{name}_norm" for name in "qk"},
    ends=("<|im_end|>", "<|endoftext|>"),
)
