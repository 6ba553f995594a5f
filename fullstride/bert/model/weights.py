"""Weights in Hugging Face's layout, folders of `config.json` and `model.safetensors`: read, checked, written."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray
from safetensors import SafetensorError, safe_open
from safetensors.flax import save

from fullstride.bert.model.bert import Bert
from fullstride.bert.model.config import BertConfig
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import note, replace_file

ENCODER, HEAD = "bert.", "cls."
# Of older files.
LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# Where a model has no place for what training next-sentence prediction left, or for numbers from 0 to 511.
WITHOUT_PLACE = ("cls.seq_relationship.", "bert.embeddings.position_ids")
# The decoder is the embedding, and its bias the head's.
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}

EMBEDDINGS = {
    ".embeddings.tokens": "bert.embeddings.word_embeddings",
    ".embeddings.positions": "bert.embeddings.position_embeddings",
    ".embeddings.types": "bert.embeddings.token_type_embeddings",
    ".embeddings.norm": "bert.embeddings.LayerNorm",
    ".pooler": "bert.pooler.dense",
    ".head.dense": "cls.predictions.transform.dense",
    ".head.norm": "cls.predictions.transform.LayerNorm",
    ".head": "cls.predictions",
}
LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}


def named(model: Bert) -> Iterator[tuple[str, Any]]:
    """Every array of a model under its name in a file, in the model's own order."""
    known = EMBEDDINGS | {
        f".layers[{i}].{ours}": f"bert.encoder.layer.{i}.{theirs}"
        for i in range(model.config.layers)
        for ours, theirs in LAYER.items()
    }
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        owner, _, field = jax.tree_util.keystr(path).rpartition(".")
        if field != "inference":
            yield f"{known[owner]}.{field}", leaf


def canonical(name: str, bare: bool) -> str:
    """A name as new files have it; `bare` says that the file's encoder has no prefix."""
    for old, new in LEGACY.items():
        name = name.replace(old, new)
    return ENCODER + name if bare and not name.startswith((ENCODER, HEAD)) else name


CONFIG, WEIGHTS = "config.json", "model.safetensors"
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_length",
    "type_vocab_size": "types",
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "layer_norm_eps": "norm_eps",
    "initializer_range": "initializer_std",
}
# What this BERT is; a file may leave it out, or say the same.
FIXED = {
    "model_type": ("bert",),
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "tie_word_embeddings": (True,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}


def load(folder: str | Path, *, key: PRNGKeyArray | None = None, **changes: Any) -> Bert:
    """A model from a folder with `config.json` and `model.safetensors`, as transformers saves BERT.

    Args:
        folder: folder of the files; names may begin with `bert.` or not, and head and pooler may be absent.
        key: random key of a new head if the file has none; without a key there is no new head.
        changes: fields of `BertConfig` other than sizes, such as `attention` or `attention_dropout`. By default
            no attention weights are dropped, whatever the file says, so that attention can be fused.

    Raises:
        ConfigError: if a file is missing or damaged, is of another architecture, or lacks, adds or misshapes weights:
            all of those are listed.

    """
    folder = Path(folder)
    arrays = _arrays(folder / WEIGHTS)
    has_head = any(name.startswith(HEAD) for name in arrays)
    parts = {"head": has_head or key is not None, "pooler": any(".pooler." in name for name in arrays)}
    config = replace(read_config(folder / CONFIG), **parts, **changes)
    model = eqx.filter_eval_shape(Bert, config, key=jax.random.key(0))
    if not has_head and key is not None:
        note(f"{folder / WEIGHTS} has no head for masked tokens; initializing a new one")
        fresh = Bert(config, key=key)
        arrays |= {name: x for name, x in named(fresh) if name.startswith(HEAD)}
    return filled(model, arrays, str(folder / WEIGHTS))


def filled(model: Bert, arrays: Mapping[str, Any], source: str) -> Bert:
    """A model with other arrays, by their names in a file.

    Args:
        model: a model of arrays or of shapes.
        arrays: the arrays, which are cast to fp32.
        source: name of the file in errors.

    Raises:
        ConfigError: listing what is missing, unexpected or of another shape.

    """
    wanted = dict(named(model))
    missing, unexpected = sorted(wanted.keys() - arrays.keys()), sorted(arrays.keys() - wanted.keys())
    misshapen = [
        f"{name} is {list(arrays[name].shape)} for {list(wanted[name].shape)}"
        for name in wanted.keys() & arrays.keys()
        if arrays[name].shape != wanted[name].shape
    ]
    found = {"missing": missing, "unexpected": unexpected, "of another shape": sorted(misshapen)}
    if wrong := [f"{what}: {', '.join(names)}" for what, names in found.items() if names]:
        raise ConfigError(f"{source}: {'; '.join(wrong)}; expected the weights that config.json describes")
    values = (jnp.asarray(arrays[name], jnp.float32) for name in wanted)
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, bool) else next(values), model)


def _arrays(path: Path) -> dict[str, Any]:
    """Every array of a file by its canonical name, tied ones checked and left out."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected a folder with {CONFIG} and {WEIGHTS}")
    try:
        with safe_open(path, framework="flax") as file:
            # Files of pure encoders have no prefix anywhere.
            bare = not any(name.startswith(ENCODER) for name in file.keys())  # noqa: SIM118, it is no dict
            arrays = {canonical(name, bare): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error}); download it again") from None
    for copy, original in TIED.items():
        if copy in arrays and original in arrays and not np.array_equal(arrays.pop(copy), arrays[original]):
            raise ConfigError(f"{path}: {copy} differs from {original}; expected a model whose decoder is tied")
    placeless = sorted(name for name in arrays if name.startswith(WITHOUT_PLACE))
    if lost := [name for name in placeless if not name.endswith("position_ids")]:
        note(f"{path}: not used, since next-sentence prediction is not supported: {', '.join(lost)}")
    return {name: x for name, x in arrays.items() if name not in placeless}


def read_config(path: Path) -> BertConfig:
    """The configuration of a `config.json`; no attention weights are dropped, see `load`.

    Raises:
        ConfigError: if it cannot be read, lacks a size, or is of another architecture.

    """
    try:
        given = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected transformers' config.json of a BERT") from None
    for name, known in FIXED.items():
        if given.get(name, known[0]) not in known:
            raise ConfigError(f"{path}: {name}={given[name]}; expected {known[0]}; only BERT is supported")
    if lacking := [name for name in list(FIELDS)[:6] if name not in given]:
        raise ConfigError(f"{path}: no {', '.join(lacking)}; expected transformers' config.json of a BERT")
    fields: dict[str, Any] = {ours: given[theirs] for theirs, ours in FIELDS.items() if theirs in given}
    fields["attention_dropout"] = 0.0
    try:
        return BertConfig(**fields)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def save_model(model: Bert, folder: str | Path, **more: Any) -> Path:
    """Write `config.json` and `model.safetensors` for transformers, and for `load`.

    Args:
        model: the model.
        folder: folder, created if missing; files of these names are replaced.
        more: further entries of config.json, such as `pad_token_id`.

    Returns:
        The folder.

    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    prefix = 0 if model.config.head else len(ENCODER)
    arrays = {name[prefix:]: jnp.asarray(x) for name, x in named(model)}
    replace_file(folder / WEIGHTS, save(arrays, {"format": "pt"}))
    described = {"architectures": ["BertForMaskedLM" if model.config.head else "BertModel"]}
    described |= {name: known[0] for name, known in FIXED.items()}
    described |= {theirs: getattr(model.config, ours) for theirs, ours in FIELDS.items()}
    replace_file(folder / CONFIG, json.dumps({**described, "dtype": "float32", **more}, indent=1) + "\n")
    return folder
