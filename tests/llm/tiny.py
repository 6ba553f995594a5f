"""Random models of a few hundred kilobytes, made by transformers, and a byte-level tokenizer of a few texts."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 320
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BASE: dict[str, Any] = {
    "vocab_size": 344,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
QWEN3: dict[str, Any] = {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}
LLAMA: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
QWEN2: dict[str, Any] = {"shards": "200KB"}
# For sequences several times as long as the model was first made for.
LINEAR: dict[str, Any] = {"rope_parameters": {"rope_type": "linear", "rope_theta": 3e4, "factor": 2.5}}
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 96,
    },
}
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mistral": transformers.MistralConfig,
    "smollm3": transformers.SmolLM3Config,
    "granite": transformers.GraniteConfig,
    "phi3": transformers.Phi3Config,
    "olmo2": transformers.Olmo2Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "mixtral": transformers.MixtralConfig,
    "gpt_oss": transformers.GptOssConfig,
}
# Of each family what its layers have of their own; windows are shorter than the texts of tests.
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.3, 2.9],
    "long_factor": [4.0, 5.0, 6.0],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 37, "head_dim": 14},
    "smollm3": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    "granite": {
        "embedding_multiplier": 2.7,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "logits_scaling": 3.3,
    },
    "phi3": {"original_max_position_embeddings": 144, "rope_parameters": LONGROPE, "sliding_window": 51},
    "olmo2": {},
    "gemma2": {
        "num_hidden_layers": 3,
        "head_dim": 14,
        "sliding_window": 29,
        "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 2.5,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "num_hidden_layers": 3,
        "head_dim": 14,
        "sliding_window": 29,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 9,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e5},
        },
    },
    "qwen3_moe": {
        "head_dim": 14,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 37},
    "gpt_oss": {
        "num_hidden_layers": 3,
        "head_dim": 14,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "sliding_window": 29,
        "swiglu_limit": 1.3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
}
TEXTS = (
    "The quick brown fox jumps over the lazy dog; the dog sleeps on, as dogs do in the sun.",
    "What is the capital of France? The capital of France is Paris. What is it of Spain? It is Madrid.",
    '{"name": "value", "list": [1, 2, 3], "nested": {"true": true, "null": null}}',
    "def square(x):\n    return x * x\n\nprint(square(12))\n",
    "naïve café, Zürich, 東京, Москва, 👩‍🚀 🎉",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text can be encoded, and ids from 320 to 343 of the models are no token's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def save_tokenizer(folder: Path) -> None:
    """tokenizer.json, its configuration and a chat template, as transformers writes them."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(folder)


def make_model(kind: str, seed: int, **settings: Any) -> Any:
    """A random model in fp32, whose norms and biases are random, too."""
    torch.manual_seed(seed)
    config = CONFIGS[kind](**{**BASE, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def save_model(
    folder: Path, kind: str, seed: int, shards: str = "5GB", dtype: str = "float32", **settings: Any
) -> None:
    """The model's configuration and safetensors, in several files if it is larger than `shards`."""
    model = make_model(kind, seed, **settings).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shards)
