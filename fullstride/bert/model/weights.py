"""Folders of `config.json` and `model.safetensors` in Hugging Face's layout: read, checked, written."""

import json
from collections.abc import Mapping
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
from fullstride.bert.model.weight_names import ENCODER, HEAD, TIED, WITHOUT_PLACE, canonical, named
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import note, replace_file

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
        folder: of the files; the encoder's names may begin with `bert.` or not, the head and the pooler may be absent.
        key: where the file has no head, of a new one; without it the model has none.
        changes: fields of `BertConfig` that are no sizes, such as `attention` or `attention_dropout`. Unless given,
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
        note(f"{folder / WEIGHTS} has no head for masked tokens; it gets a new one")
        fresh = Bert(config, key=key)
        arrays |= {name: x for name, x in named(fresh) if name.startswith(HEAD)}
    return filled(model, arrays, str(folder / WEIGHTS))


def filled(model: Bert, arrays: Mapping[str, Any], source: str) -> Bert:
    """A model with other arrays, by their names in a file.

    Args:
        model: of arrays or of shapes.
        arrays: cast to fp32.
        source: what errors call the file.

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
        raise ConfigError(f"{path}: not a safetensors file that can be read ({error}); get it again") from None
    for copy, original in TIED.items():
        if copy in arrays and original in arrays and not np.array_equal(arrays.pop(copy), arrays[original]):
            raise ConfigError(f"{path}: {copy} differs from {original}; expected a model whose decoder is tied")
    placeless = sorted(name for name in arrays if name.startswith(WITHOUT_PLACE))
    if lost := [name for name in placeless if not name.endswith("position_ids")]:
        note(f"{path}: not used, as there is no next-sentence prediction here: {', '.join(lost)}")
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
            raise ConfigError(f"{path}: {name}={given[name]}; expected {known[0]}, this is BERT alone")
    if lacking := [name for name in list(FIELDS)[:6] if name not in given]:
        raise ConfigError(f"{path}: no {', '.join(lacking)}; expected transformers' config.json of a BERT")
    fields: dict[str, Any] = {ours: given[theirs] for theirs, ours in FIELDS.items() if theirs in given}
    fields["attention_dropout"] = 0.0
    try:
        return BertConfig(**fields)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def config_json(config: BertConfig, **more: Any) -> dict[str, Any]:
    """What transformers wants to know of a model."""
    sizes = {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
    fixed = {name: known[0] for name, known in FIXED.items()}
    architecture = "BertForMaskedLM" if config.head else "BertModel"
    return {"architectures": [architecture], **fixed, **sizes, "dtype": "float32", **more}


def save_model(model: Bert, folder: str | Path, **more: Any) -> Path:
    """Write `config.json` and `model.safetensors` for transformers, and for `load`.

    Args:
        model: the model.
        folder: made if it is not there; files of these names are replaced.
        more: further entries of config.json, such as `pad_token_id`.

    Returns:
        The folder.

    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    prefix = 0 if model.config.head else len(ENCODER)
    arrays = {name[prefix:]: jnp.asarray(x) for name, x in named(model)}
    replace_file(folder / WEIGHTS, save(arrays, {"format": "pt"}))
    replace_file(folder / CONFIG, json.dumps(config_json(model.config, **more), indent=1) + "\n")
    return folder
