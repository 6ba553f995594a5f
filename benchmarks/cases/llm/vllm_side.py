"""vLLM's side of `benchmarks llm`: a script for an interpreter with vLLM, independent of fullstride.

It reads `asked.json` beside itself, runs the model of the folder `model` there, and writes `found.json`.
"""

import json
import time
from pathlib import Path
from typing import Any

NAME = "vLLM"
# What it is asked to do: prompts as token ids, tokens of each answer, and how many runs after the first are timed.
Asked = dict[str, Any]


def engine(folder: Path, asked: Asked) -> Any:
    """Return a vLLM engine with default settings, but without prefix caching and detokenization."""
    import vllm  # pyright: ignore[reportMissingImports]

    return vllm.LLM(
        model=str(folder / "model"),
        dtype=asked["dtype"],
        skip_tokenizer_init=True,
        max_model_len=asked["longest"],
        max_num_seqs=asked["at_once"],
        enable_prefix_caching=False,
    )


def complete(made: Any, prompts: list[list[int]], outputs: list[int], temperature: float) -> list[list[int]]:
    """Run all prompts and return the tokens of each answer."""
    import vllm  # pyright: ignore[reportMissingImports]

    sampling = [
        vllm.SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in outputs
    ]
    done = made.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in done]


def found(folder: Path, asked: Asked) -> dict[str, Any]:
    """Return milliseconds of a first run and of those after it, greedy tokens, and versions."""
    import torch
    import vllm  # pyright: ignore[reportMissingImports]

    made = engine(folder, asked)
    samples = []
    for _ in range(asked["runs"] + 1):
        started = time.perf_counter()
        tokens = complete(made, asked["prompts"], asked["outputs"], asked["temperature"])
        samples.append((time.perf_counter() - started) * 1e3)
        if [*map(len, tokens)] != asked["outputs"]:
            raise SystemExit(f"{NAME}: answers of {[*map(len, tokens)]} tokens, expected {asked['outputs']}")
    (greedy,) = complete(made, asked["gate_prompts"], asked["gate_outputs"], 0.0)
    versions = {"vllm": vllm.__version__, "vllm's torch": torch.__version__}
    return {"ms": {NAME: samples}, "greedy": {NAME: greedy}, "versions": versions}


if __name__ == "__main__":
    here = Path(__file__).parent
    (here / "found.json").write_text(json.dumps(found(here, json.loads((here / "asked.json").read_text()))))
