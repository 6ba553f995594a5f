"""Description of a model family; all are pre-norm, RMSNorm, SwiGLU, RoPE, GQA decoders."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class PreTokenizer(NamedTuple):
    """Pre-tokenizer of a byte-level tokenizer in a GGUF file; by default GPT-2's.

    Attributes:
        digits: how many of them go together, as a regular expression counts, in the words of Qwen2 and Llama 3.
        single_digits: whether each digit is a word of its own, with GPT-2's other rules.
        ignore_merges: whether a word of the vocabulary is one token, whatever the merges say.
        begins: whether a text begins with the begin-of-text token, unless the file says otherwise.
        composed: whether a text is first normalized to Unicode's composed form (NFC).

    """

    digits: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    begins: bool = False
    composed: bool = False


@dataclass(frozen=True)
class Family:
    """Model family: a row of `FAMILIES`, under the name in config.json and GGUF files.

    Attributes:
        qk_norm: whether queries and keys are normalized over head_dim before RoPE.
        qkv_bias: whether the three projections have biases.
        interleaved: whether a GGUF interleaves the two halves of a head's rows of q and k, as llama.cpp does.
        fixed: keys of config.json that would change the arithmetic, and what they may be if they are there, beside
            those of `fullstride/llm/weights/hf_folder.py`.
        tensors: our names of a layer's tensors by those of Hugging Face, in addition to the common ones.
        gguf_tensors: our names of a layer's tensors by those of llama.cpp.
        words: pre-tokenizers of its tokenizers, by llama.cpp's names.
        ends: special tokens that end an answer.

    """

    qk_norm: bool = False
    qkv_bias: bool = False
    interleaved: bool = False
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    gguf_tensors: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, PreTokenizer] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
