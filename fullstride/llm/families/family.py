"""A family's own layers, names and words; all families are pre-norm, RMSNorm, SwiGLU, RoPE, GQA decoders."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class PreTokenizer(NamedTuple):
    """How a byte-level tokenizer in a GGUF cuts a text, without anything as GPT-2's does.

    Attributes:
        digits: how many of them go together, as a regular expression counts, in the words of Qwen2 and Llama 3.
        single_digits: each digit stands alone, in GPT-2's words.
        ignore_merges: a word of the vocabulary is a token, however it could be merged.
        begins: the beginning's token goes before a text unless the file says otherwise.
        composed: a text is brought into Unicode's composed form (NFC) first.

    """

    digits: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    begins: bool = False
    composed: bool = False


@dataclass(frozen=True)
class Family:
    """A row of `FAMILIES`, by the name that config.json and a GGUF give it.

    Attributes:
        qk_norm: queries and keys are normalised over head_dim before RoPE.
        qkv_bias: the three projections have biases.
        interleaved: in a GGUF the two halves of a head's rows of q and k lie interleaved, as llama.cpp rotates them.
        fixed: keys of config.json that would change the arithmetic, and what they may be if they are there, beside
            those of `fullstride/llm/weights/hf_folder.py`.
        tensors: our names of a layer's tensors by those of Hugging Face, beside the usual ones.
        gguf_tensors: the same by those of llama.cpp.
        words: of its tokenizers, by the names that llama.cpp gives these.
        ends: marks of its chats and texts that end an answer.

    """

    qk_norm: bool = False
    qkv_bias: bool = False
    interleaved: bool = False
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    gguf_tensors: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, PreTokenizer] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
