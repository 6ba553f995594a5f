"""The baseline of `fullstride bench llm`, in a process of its own: `generate` of transformers, in PyTorch."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from fullstride.llm.bench_work import ATTENTION, TEMPERATURE, Work, model, small
from fullstride.llm.config import ModelConfig

CONFIGS = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"},
    **{f"{name}_norm": f"self_attn.{name}_norm.weight" for name in "qk"},
}
TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}


def network(loaded: Any, device: str, attention: str = ATTENTION) -> Any:
    """The same model with the same weights, its attention by that name; scaled RoPE is not known here."""
    c: ModelConfig = loaded.config
    if c.rope_scaling is not None:
        raise SystemExit("the baseline runs no model with scaled RoPE; use --no-baseline")
    config = CONFIGS[c.architecture](
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        rms_norm_eps=c.rms_eps,
        tie_word_embeddings=c.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, c.dtype), attn_implementation=attention
        ).eval()
    own = dict(made.named_parameters())
    with torch.no_grad():
        for name in loaded.parameters:
            own[_name(name)].copy_(torch.from_numpy(np.array(loaded.parameters[name], np.float32)))
    return made


def _name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}"


def generate(made: Any, prompts: list[list[int]], count: int, temperature: float) -> list[list[int]]:
    """Answers of `count` tokens, prompts padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=made.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=made.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.inference_mode():
        out = made.generate(ids, attention_mask=mask, max_new_tokens=count, pad_token_id=0, **sampling)
    return out[:, longest:].tolist()


def timed(call: Callable[[], Any], runs: int, device: str) -> list[float]:
    """Milliseconds of the first call, then of `runs` more."""
    samples = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - started) * 1e3)
    return samples


def main(source: str, dtype: str, device: str, runs: int, attention: str) -> dict[str, Any]:
    """Times of both ways, 20 greedy tokens for the gate, and which attention ran, be it in another's place."""
    loaded = model(source, dtype)
    made, work = network(loaded, device, attention), small(loaded.config.vocab_size)

    def one_by_one(work: Work = work):
        for prompt, count in zip(work.prompts, work.outputs, strict=True):
            generate(made, [prompt], count, TEMPERATURE)

    return {
        "attention": made.config._attn_implementation,
        "greedy": generate(made, work.prompts[-1:], 20, 0)[0],
        "transformers, one by one": timed(one_by_one, runs, device),
        "transformers, batched": timed(
            lambda: generate(made, work.prompts, work.outputs[0], TEMPERATURE), runs, device
        ),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


if __name__ == "__main__":
    given = sys.argv[1:]
    found = main(given[0], given[1], given[2], int(given[3]), given[4])
    sys.stdout.write(json.dumps(found))
