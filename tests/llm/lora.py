"""Random LoRA adapters in PEFT's form, and models with one merged by hand."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path, model: Any, rng: np.random.Generator, *, rank: int, modules: tuple[str, ...], **settings: Any
) -> Path:
    """Random factors for these modules of a model of transformers; `rank_pattern` gives some a rank of their own."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), **settings}
    tensors = {}
    for name, module in model.named_modules():
        if (last := name.rpartition(".")[2]) not in modules:
            continue
        own = config.get("rank_pattern", {}).get(last, rank)
        for half, shape in {"A": (own, module.in_features), "B": (module.out_features, own)}.items():
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = rng.normal(0, 0.3, shape).astype(np.float32)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(model: Any, folder: Path) -> Any:
    """Return the model in fp64 with W + scale B A in place of each adapted W."""
    made, config = copy.deepcopy(model).double(), json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for key, a in tensors.items():
        if ".lora_A." not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha = config.get("alpha_pattern", {}).get(name.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        update = tensors[key.replace("lora_A", "lora_B")].astype(np.float64) @ a.astype(np.float64)
        made.get_submodule(name).weight.data += scale * torch.from_numpy(update)
    return made
