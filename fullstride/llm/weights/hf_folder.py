"""Folders as Hugging Face lays them out: config.json, tokenizer.json, one or several safetensors files."""

import re
from dataclasses import replace
from pathlib import Path, PurePosixPath

from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.families import FAMILIES
from fullstride.llm.text.tokenizer import Tokenizer
from fullstride.llm.text.tokenizer_folder import read_json
from fullstride.llm.weights import suggested
from fullstride.llm.weights.canonical import canonical, in_order, listed
from fullstride.llm.weights.hf_config import read_config
from fullstride.llm.weights.parameters import Stored
from fullstride.llm.weights.safetensors_file import open_safetensors
from fullstride.llm.weights.settings import shortened

INDEX = "model.safetensors.index.json"
# Characters of a file's name; Linux takes no longer ones.
MOST_NAME = 255
OUTER = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "head"}
INNER = {
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
LAYERS = re.compile(r"model\.layers\.(\d+)\.(.+)")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Old checkpoints hold these, which follow from the configuration.
DERIVED = "rotary_emb.inv_freq"


def load_folder(folder: Path) -> tuple[ModelConfig, dict[str, Stored], Tokenizer, dict[str, int | float]]:
    """A folder's configuration, mapped parameters, tokenizer and suggested sampling.

    Raises:
        ConfigError: if a file is missing, damaged, or of a model that the engine does not run.

    """
    config = read_config(folder)
    inner = {**INNER, **FAMILIES[config.architecture].tensors}
    found: dict[str, Stored] = {}
    for file in _files(folder):
        for name, tensor in open_safetensors(file).items():
            if not (name.endswith(DERIVED) or (config.tied and name == "lm_head.weight")):
                found[canonical(name, LAYERS, inner, OUTER)] = tensor
    stored = in_order(folder, config, found)
    config = replace(config, dtype=config.dtype or DTYPES[stored["embed"].kind])
    return config, stored, Tokenizer.from_folder(folder), suggested.of_folder(folder)


def _named(index: Path) -> list[str]:
    """The file of each tensor."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{index}: weight_map: expected an object with a file's name for each tensor")
    return [_within(index, name) for name in dict.fromkeys(names.values())]


def _within(index: Path, name: str) -> str:
    """Return a name of a file in the folder, which may be a link, as all are in Hugging Face's cache."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or len(name) > MOST_NAME:
        raise ConfigError(f"{index}: weight_map names {shortened(repr(name))}: expected a file in its folder")
    return name


def _files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, all of which are there."""
    single = folder / "model.safetensors"
    if (folder / INDEX).is_file():
        files = [folder / name for name in _named(folder / INDEX)]
    else:
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{folder}: {INDEX} names {listed(missing)}, not there")
    if not files:
        raise ConfigError(f"{folder}: no *.safetensors; weights in other formats have to be saved as that, or as GGUF")
    return files
