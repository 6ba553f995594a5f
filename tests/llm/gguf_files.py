"""GGUF files of the tiny models, written by the `gguf` package as llama.cpp's converter would."""

import json
import math
from collections.abc import Iterator
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
# llama.cpp's names of the families that it calls otherwise, and those whose heads its converter interleaves.
ARCHITECTURES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "mixtral": "llama", "gpt_oss": "gpt-oss"}
INTERLEAVED = ("llama", "mixtral", "smollm3", "granite")
SHIFTED = ("gemma2", "gemma3_text")


def write_gguf(path: Path, model: Any, kind: str = "F32", **metadata: Any) -> Path:
    """A model of transformers and the tiny tokenizer; matrices are packed as `kind`, vectors are F32."""
    config = model.config
    architecture = str(ARCHITECTURES.get(config.model_type, config.model_type))
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, config)
    OWN.get(config.model_type, lambda *_: None)(writer, config)
    _write_tokenizer(writer, config.vocab_size)
    for key, value in metadata.items():
        writer.add_string(key, value)
    known = {ours: number for number, ours in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config.num_hidden_layers)
    apart = _gpt_oss_apart if config.model_type == "gpt_oss" else _apart
    for name, value in apart(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = _permuted(name, value.float().numpy(), config)
        if config.model_type in SHIFTED and name.endswith("norm.weight"):
            array = array + np.float32(1)
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written is not None
        _write_tensor(writer, written, array, kind)
    if _rope_of(config)["rope_type"] == "llama3":
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
    writer.add_rope_freq_base(_rope_of(config)["rope_theta"])
    _write_rope(writer, _rope_of(config))
    if getattr(config, "head_dim", None) and config.model_type != "granite":
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
    packed = value.ndim > 1 and name.endswith(".weight") and (kind != "MXFP4" or "_exps" in name)
    packing = gguf.GGMLQuantizationType[kind if packed else "F32"]
    value = np.ascontiguousarray(value)
    writer.add_tensor(name, value if packing.name == "F32" else quantize(value, packing), raw_dtype=packing)


def _rope_of(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """The RoPE of all layers, or of those without a window."""
    return config.rope_parameters.get("full_attention", config.rope_parameters)


def _apart(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts' gates and their other halves, which transformers has in one tensor."""
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), value.chunk(2, 1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{part}_proj.weight", half
        else:
            yield f"{name}.weight" if name.endswith("experts.down_proj") else name, value


def _gpt_oss_apart(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """GPT-OSS's, in which the two take turns, as do their biases; matrices are (in, out)."""
    for name, value in state.items():
        layer, experts, part = name.partition("experts.")
        turned = value.transpose(1, 2) if experts and value.ndim == 3 else value
        own = f"{layer}experts.{{}}_proj.{'bias' if part.endswith('bias') else 'weight'}"
        if part.startswith("gate_up"):
            yield own.format("gate"), turned[:, 0::2]
            yield own.format("up"), turned[:, 1::2]
        else:
            yield own.format("down") if experts else f"{name}.weight" if name.endswith("sinks") else name, turned


def _granite(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _gemma2(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _gemma3(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _experts(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _gpt_oss(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    _experts(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)


def _phi3(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    rope, original = config.rope_parameters, config.original_max_position_embeddings
    writer.add_rope_dimension_count(2 * len(rope["short_factor"]))
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_rope_scaling_orig_ctx_len(original)
    scale = config.max_position_embeddings / original
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", np.asarray(rope[f"{name}_factor"], np.float32))


OWN = {
    "granite": _granite,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "qwen3_moe": _experts,
    "mixtral": _experts,
    "phi3": _phi3,
    "gpt_oss": _gpt_oss,
}


def _permuted(name: str, value: np.ndarray, config: transformers.PretrainedConfig) -> np.ndarray:
    """Queries and keys of some families, the two halves of a head interleaved."""
    if config.model_type not in INTERLEAVED or not name.endswith(("q_proj.weight", "k_proj.weight")):
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
