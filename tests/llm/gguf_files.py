"""GGUF files of the tiny models, written by the `gguf` package as llama.cpp's converter would."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import quantize
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.llm.tiny import SPECIAL, TEMPLATE, make_tokenizer

NORMAL, CONTROL, UNUSED = 1, 3, 5
INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def write_gguf(path: Path, model: Any, kind: str = "F32", **metadata: Any) -> Path:
    """A model of transformers and the tiny tokenizer; matrices are packed as `kind`, vectors are F32."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    _write_sizes(writer, config)
    _write_tokenizer(writer, config.vocab_size)
    for key, value in metadata.items():
        writer.add_string(key, value)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        _write_tensor(writer, _renamed(name), _permuted(name, value.float().numpy(), config), kind)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_sizes(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _write_rope(writer, config.rope_parameters)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)


def _write_rope(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    """How positions are scaled, but for Llama 3's way, which has a tensor."""
    kind = rope["rope_type"].upper()
    if kind in ("LINEAR", "YARN"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[kind])
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "YARN":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for key in ("beta_fast", "beta_slow"):
        if rope.get(key):
            getattr(writer, f"add_rope_scaling_yarn_{key}")(rope[key])


def _write_tokenizer(writer: gguf.GGUFWriter, rows: int) -> None:
    """The tiny tokenizer, with a text for each padding row as the converter makes one up."""
    state = make_tokenizer()
    vocabulary = {token: text for text, token in state.get_vocab().items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([vocabulary.get(token, f"[PAD{token}]") for token in range(rows)])
    kinds = [CONTROL if vocabulary.get(token) in SPECIAL else NORMAL for token in range(len(vocabulary))]
    writer.add_token_types(kinds + [UNUSED] * (rows - len(kinds)))
    merges = json.loads(state.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _write_tensor(writer: gguf.GGUFWriter, name: str, value: np.ndarray, kind: str) -> None:
    packing = gguf.GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
    packed = value if packing.name == "F32" else quantize(value, packing)
    writer.add_tensor(name, packed, raw_dtype=packing)


def _renamed(name: str) -> str:
    if name in OUTER or not name.startswith("model.layers."):
        return OUTER.get(name, "output.weight")
    _, _, layer, inner = name.split(".", 3)
    module, _, end = inner.rpartition(".")
    return f"blk.{layer}.{INNER[module]}.{end}"


def _permuted(name: str, value: np.ndarray, config: transformers.PretrainedConfig) -> np.ndarray:
    """Llama's queries and keys, the two halves of a head interleaved."""
    if config.model_type != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return value
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    halves = value.reshape(heads, 2, -1, value.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)


def _divisors(config: transformers.PretrainedConfig) -> np.ndarray:
    """Return llama3's divisor of each frequency, from transformers' own frequencies."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    rope = config.rope_parameters
    plain = rope["rope_theta"] ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    return (plain / scaled.double().numpy()).astype(np.float32)
