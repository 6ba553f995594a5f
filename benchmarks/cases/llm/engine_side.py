"""Other engines' side of `benchmarks llm`: a script for an interpreter that has them, independent of fullstride.

It reads `asked.json` beside itself, runs the model of the folder `model` there, and writes `found.json`: times, greedy
tokens, versions and flags; or why the engine did not run.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

# What it is asked to do: an engine's name, prompts as token ids, tokens of each answer, and how many runs after the
# first are timed.
Asked = dict[str, Any]
# nano-vllm refuses to decode greedily: logits divided by this are as good.
COLD = 1e-6


class Peer(NamedTuple):
    """Engine that is ready to run.

    Attributes:
        complete: function of prompts, tokens of each answer and a temperature to the tokens of each answer.
        version: version of the engine.
        flags: what was set, and what else the numbers depend on.

    """

    complete: Callable[[list[list[int]], list[int], float], list[list[int]]]
    version: str
    flags: str


def vllm(folder: Path, asked: Asked, **tuned: Any) -> Peer:
    """Return vLLM without prefix caching and detokenization, and with settings besides its defaults."""
    import vllm as package  # pyright: ignore[reportMissingImports]

    made = package.LLM(
        model=str(folder / "model"),
        dtype=asked["dtype"],
        skip_tokenizer_init=True,
        max_model_len=asked["longest"],
        max_num_seqs=asked["at_once"],
        enable_prefix_caching=False,
        **tuned,
    )

    def complete(prompts: list[list[int]], outputs: list[int], temperature: float) -> list[list[int]]:
        sampling = [
            package.SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in outputs
        ]
        done = made.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in done]

    flags = {"enable_prefix_caching": False, "max_num_seqs": asked["at_once"], **tuned}
    return Peer(complete, package.__version__, ", ".join(f"{name}={value}" for name, value in flags.items()))


def vllm_tuned(folder: Path, asked: Asked) -> Peer:
    """Return vLLM with whole decode steps as CUDA graphs, scheduling ahead, and prompts in few steps."""
    tuned = {"async_scheduling": True, "max_num_batched_tokens": 16384}
    return vllm(folder, asked, **tuned, compilation_config={"cudagraph_mode": "FULL"})


def sglang(folder: Path, asked: Asked) -> Peer:
    """Return SGLang without prefix caching and detokenization."""
    import sglang as package  # pyright: ignore[reportMissingImports]

    settings = {"disable_radix_cache": True, "max_running_requests": asked["at_once"]}
    made = package.Engine(
        model_path=str(folder / "model"),
        dtype=asked["dtype"],
        skip_tokenizer_init=True,
        context_length=asked["longest"] + 1,
        **settings,
    )

    def complete(prompts: list[list[int]], outputs: list[int], temperature: float) -> list[list[int]]:
        sampling = [{"temperature": temperature, "max_new_tokens": count, "ignore_eos": True} for count in outputs]
        return [list(answer["output_ids"]) for answer in made.generate(input_ids=prompts, sampling_params=sampling)]

    return Peer(complete, package.__version__, ", ".join(f"{name}={value}" for name, value in settings.items()))


def nano_vllm(folder: Path, asked: Asked) -> Peer:
    """Return nano-vllm from a checkout; the folder needs no tokenizer, and no run finds the prefixes of another."""
    sys.path.insert(0, asked["checkout"])
    attention = flash_attention()
    import transformers

    tokenizer = SimpleNamespace(eos_token_id=-1, decode=lambda ids: "")
    transformers.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer)  # pyright: ignore
    from nanovllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    if sys.modules["flash_attn"].__spec__ is None:
        del sys.modules["flash_attn"]  # which transformers would take for the package
    made = LLM(str(folder / "model"), max_model_len=asked["longest"], max_num_seqs=asked["at_once"])

    def complete(prompts: list[list[int]], outputs: list[int], temperature: float) -> list[list[int]]:
        made.scheduler.block_manager.hash_to_block_id.clear()
        sampling = [SamplingParams(temperature=temperature or COLD, max_tokens=n, ignore_eos=True) for n in outputs]
        return [list(answer["token_ids"]) for answer in made.generate(prompts, sampling, use_tqdm=False)]

    return Peer(complete, f"checkout {Path(asked['checkout']).name}", f"prefix cache emptied, {attention}")


def flash_attention() -> str:
    """Provide the two functions of `flash_attn` that nano-vllm calls, and return whose they are.

    Raises:
        ImportError: if neither `flash_attn` nor vLLM's build of it is installed.

    """
    if find_spec("flash_attn") is not None:
        return f"flash_attn {__import__('flash_attn').__version__}"
    if find_spec("vllm") is None:
        raise ImportError("neither flash_attn nor vLLM, which has a build of its functions, is installed")
    import torch
    import vllm as package  # pyright: ignore[reportMissingImports]
    from vllm.vllm_flash_attn import flash_attn_varlen_func as varlen  # pyright: ignore[reportMissingImports]

    def flash_attn_varlen_func(q: Any, k: Any, v: Any, *, cu_seqlens_k: Any, block_table: Any, **others: Any) -> Any:
        if block_table is None:
            return varlen(q, k, v, cu_seqlens_k=cu_seqlens_k, **others)
        return varlen(q, k, v, seqused_k=cu_seqlens_k.diff().int(), block_table=block_table, **others)

    def flash_attn_with_kvcache(q: Any, k: Any, v: Any, *, cache_seqlens: Any, block_table: Any, **others: Any) -> Any:
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        longest = block_table.shape[1] * k.shape[1]
        others |= {"max_seqlen_q": 1, "cu_seqlens_q": starts, "max_seqlen_k": longest, "seqused_k": cache_seqlens}
        return varlen(q.squeeze(1), k, v, block_table=block_table, **others).unsqueeze(1)

    module: Any = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    sys.modules["flash_attn"] = module
    return f"flash attention of vLLM {package.__version__}"


ENGINES = {
    "vllm": ("vLLM", vllm),
    "vllm-tuned": ("vLLM, tuned", vllm_tuned),
    "sglang": ("SGLang", sglang),
    "nano-vllm": ("nano-vllm", nano_vllm),
}


def found(folder: Path, asked: Asked) -> dict[str, Any]:
    """Return milliseconds of a first run and of those after it, greedy tokens, versions and flags."""
    name, start = ENGINES[asked["engine"]]
    made = start(folder, asked)
    import torch

    samples = []
    for _ in range(asked["runs"] + 1):
        started = time.perf_counter()
        tokens = made.complete(asked["prompts"], asked["outputs"], asked["temperature"])
        samples.append((time.perf_counter() - started) * 1e3)
        if [*map(len, tokens)] != asked["outputs"]:
            raise SystemExit(f"{name}: answers of {[*map(len, tokens)]} tokens, expected {asked['outputs']}")
    (greedy,) = made.complete(asked["gate_prompts"], asked["gate_outputs"], 0.0)
    versions = {asked["engine"]: made.version, f"{name}'s torch": torch.__version__}
    return {"ms": {name: samples}, "greedy": {name: greedy}, "versions": versions, "flags": {name: made.flags}}


if __name__ == "__main__":
    here = Path(__file__).parent
    given = json.loads((here / "asked.json").read_text())
    try:
        (here / "found.json").write_text(json.dumps(found(here, given)))
    except Exception as error:
        (here / "why.txt").write_text(f"{type(error).__name__}: {str(error)[:300]}")
        raise
