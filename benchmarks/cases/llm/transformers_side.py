"""Baseline of `python -m benchmarks llm` in a separate process: `generate` of transformers in PyTorch.

Also writes the model's weights as transformers does, for another engine.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.cases.llm.options import ATTENTION, BATCHED, ONE_BY_ONE, STATIC, WAYS
from benchmarks.cases.llm.work import GATE_TOKENS, TEMPERATURE, ModelWork, compared, model, small
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
    """Build the model in transformers with the same weights and the given attention.

    A folder is read by transformers itself; of other models those of the first families without scaled RoPE are built.
    """
    c: ModelConfig = loaded.config
    if (folder := getattr(loaded, "path", None)) is not None and folder.is_dir():
        own = {"dtype": getattr(torch, c.dtype), "attn_implementation": attention}
        made: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **own)
        made = made.to(device).eval()
        made.generation_config = transformers.GenerationConfig()  # nothing ends an answer, nor cuts its distribution
        return made
    if c.rope_scaling is not None or c.architecture not in CONFIGS:
        kind = c.architecture if c.architecture not in CONFIGS else "scaled RoPE"
        raise SystemExit(f"a GGUF file of {kind} has no baseline: give a folder, or --no-baseline, and omit --vllm")
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


def generate(made: Any, prompts: list[list[int]], count: int, temperature: float, cache: Any = None) -> list[list[int]]:
    """Generate answers of `count` tokens from left-padded prompts; a cache of fixed size is emptied first."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=made.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=made.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    if cache is not None:
        cache.reset()
        sampling |= {"past_key_values": cache}
    # What is kept from run to run is written again, which tensors of inference mode refuse outside of it.
    with torch.inference_mode() if cache is None else torch.no_grad():
        out = made.generate(ids, attention_mask=mask, max_new_tokens=count, pad_token_id=0, **sampling)
    return out[:, longest:].tolist()


def timed(call: Callable[[], Any], runs: int, device: str) -> list[float]:
    """Return milliseconds of the first call, then of `runs` more."""
    samples = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - started) * 1e3)
    return samples


def compiled(made: Any, work: ModelWork, runs: int, device: str) -> tuple[list[float], list[int]]:
    """Return times with a static KV cache, for which transformers compiles and captures a step.

    Greedy tokens of the last (longest) prompt use the same step. One cache serves all runs, because a step is captured
    with the addresses of its keys, and captured again if they move.
    """
    cache = transformers.StaticCache(config=made.config, max_cache_len=work.longest)
    ms = timed(lambda: generate(made, work.prompts, work.outputs[0], TEMPERATURE, cache), runs, device)
    return ms, generate(made, work.prompts, GATE_TOKENS, 0.0, cache)[-1]


def times(
    source: str, dtype: str, device: str, runs: int, attention: str, ways: dict[str, str] = WAYS
) -> dict[str, Any]:
    """Return the times of each way by its name, greedy tokens for the check, and the attention that ran."""
    loaded = model(source, dtype)
    made, work = network(loaded, device, attention), small(loaded.config.vocab_size)
    gate = compared(work)

    def one_by_one(work: ModelWork = work):
        for prompt, count in zip(work.prompts, work.outputs, strict=True):
            generate(made, [prompt], count, TEMPERATURE)

    def batched():
        generate(made, work.prompts, work.outputs[0], TEMPERATURE)

    eager = {way: run for way, run in ((ONE_BY_ONE, one_by_one), (BATCHED, batched)) if way in ways}
    ms = {ways[way]: timed(run, runs, device) for way, run in eager.items()}
    greedy, left_out = {}, {}
    if eager:
        greedy["transformers"] = generate(made, gate.prompts, gate.outputs[0], 0.0)[0]
    if STATIC in ways and device == "cuda":  # it compiles on no processor
        try:
            ms[ways[STATIC]], greedy[ways[STATIC]] = compiled(made, work, runs, device)
        except Exception as error:  # of a compiler: the others' times stay
            left_out[ways[STATIC]] = f"{type(error).__name__}: {str(error)[:200]}"
    elif not eager:
        left_out[ways[STATIC]] = "transformers compiles nothing on a CPU"
    return {
        "attention": made.config._attn_implementation,
        "greedy": greedy,
        "ms": ms,
        "left_out": left_out,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "flags": dict.fromkeys(ms, f"attention {attention}"),
    }


def save(source: str, dtype: str, folder: str) -> None:
    """Write the model as a folder that `from_pretrained` and others read."""
    network(model(source, dtype), "cpu").save_pretrained(folder)


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    if what == "save":
        save(given[0], given[1], given[2])
    else:
        sys.stdout.write(json.dumps(times(given[0], given[1], given[2], int(given[3]), given[4], json.loads(given[5]))))
