"""Weights in Hugging Face's layout, folders of `config.json` and safetensors: read, checked, written."""

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

from fullstride.assets.model_folder import INDEX, WEIGHTS, weight_files
from fullstride.bert.model.bert import Bert
from fullstride.bert.model.config import BertConfig
from fullstride.bert.model.families import FAMILIES, Family
from fullstride.bert.model.heads import Heads
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import note, replace_file

# Of older files.
LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# What training next-sentence prediction left.
NEXT_SENTENCE = "cls.seq_relationship."
CONFIG = "config.json"
# Entries of `config.json` that describe heads.
OF_HEADS = ("architectures", "id2label", "label2id", "problem_type", "classifier_", "seq_classif_", "qa_")


def named(model: Bert) -> Iterator[tuple[str, Any]]:
    """Every array of a model under its name in a file, in the model's own order."""
    known = FAMILIES[model.config.family].parts(model.config.layers)
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        owner, _, field = jax.tree_util.keystr(path).rpartition(".")
        if field != "inference":
            yield f"{known[owner]}.{field}", leaf


def canonical(name: str, family: Family, bare: bool) -> str:
    """A name as new files have it; `bare` says that the file's encoder has no prefix."""
    for old, new in LEGACY.items():
        name = name.replace(old, new)
    return family.prefix + name if bare and not name.startswith(family.head) else name


def load(folder: str | Path, *, key: PRNGKeyArray | None = None, **changes: Any) -> Bert:
    """A model from a folder with `config.json` and `model.safetensors` or its shards, as transformers saves them.

    Heads of a fine-tune, such as a classifier, are listed in a line, kept as they are in `Bert.heads`, and written back
    by `save_model`.

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
    tensors = _tensors(folder)
    sizes, given = read_config(folder / CONFIG)
    family = FAMILIES[sizes.family]
    arrays = _arrays(folder, tensors, family)
    has_head = any(name.startswith(family.head) for name in arrays)
    parts = {"head": has_head or key is not None, "pooler": any(".pooler." in name for name in arrays)}
    config = replace(sizes, **parts, **changes)
    wanted = {name for name, _ in named(shapes_of(config))}
    others = {name for name in arrays if not name.startswith((family.prefix, *family.head))} - wanted
    heads = _kept(folder, {name: arrays.pop(name) for name in sorted(others)}, given)
    if key is not None and not has_head:
        note(f"{folder} has no head for masked tokens; initializing a new one")
        arrays = _fresh_head(config, key) | arrays
    return filled(shapes_of(config, heads), arrays, str(folder))


def _fresh_head(config: BertConfig, key: PRNGKeyArray) -> dict[str, Any]:
    """New tensors of the head for masked tokens; compiled, so that those of the encoder are never made."""
    prefix = FAMILIES[config.family].prefix

    def head(key: PRNGKeyArray) -> dict[str, Any]:
        return {name: x for name, x in named(Bert(config, key=key)) if not name.startswith(prefix)}

    return jax.jit(head)(key)


def shapes_of(config: BertConfig, heads: Heads | None = None) -> Bert:
    """A model of shapes, without weights."""
    return eqx.filter_eval_shape(Bert, config, key=jax.random.key(0), heads=heads)


def _kept(folder: Path, arrays: Mapping[str, Any], given: Mapping[str, Any]) -> Heads | None:
    """Heads of a fine-tune, with a line that lists them."""
    if not arrays:
        return None
    note(f"{folder}: kept as they are, not used by the encoder: {', '.join(arrays)}")
    wide = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    return Heads.of(wide, {name: value for name, value in given.items() if name.startswith(OF_HEADS)})


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


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights, whole or in shards."""
    return any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def _tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of a folder."""
    if not has_weights(folder):
        raise ConfigError(f"{folder / WEIGHTS}: no such file; expected a folder with {CONFIG} and {WEIGHTS}")
    found: dict[str, Any] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="flax") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError(f"{path}: not a readable safetensors file ({error}); download it again") from None
    return found


def _arrays(folder: Path, found: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Tensors by their canonical names, tied ones checked and left out."""
    # Files of pure encoders have no prefix anywhere.
    bare = not any(name.startswith(family.prefix) for name in found)
    arrays = {canonical(name, family, bare): x for name, x in found.items()}
    for copy, original in family.tied.items():
        if copy in arrays and original in arrays and not np.array_equal(arrays.pop(copy), arrays[original]):
            raise ConfigError(f"{folder}: {copy} differs from {original}; expected a model whose decoder is tied")
    if lost := sorted(name for name in arrays if name.startswith(NEXT_SENTENCE)):
        note(f"{folder}: not used, since next-sentence prediction is not supported: {', '.join(lost)}")
    # Besides, old files hold the numbers from 0 to 511.
    return {name: x for name, x in arrays.items() if name not in lost and not name.endswith(".position_ids")}


def read_config(path: Path) -> tuple[BertConfig, dict[str, Any]]:
    """The configuration of a `config.json`, and all that it says; no attention weights are dropped, see `load`.

    Raises:
        ConfigError: if it cannot be read, lacks a size, or is of another architecture.

    """
    try:
        given = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected transformers' config.json") from None
    name = given.get("model_type", "bert")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"{path}: model_type={name}; expected one of {', '.join(FAMILIES)}")
    try:
        return _sizes(FAMILIES[name].rewritten(given), name), given
    except (ConfigError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _sizes(given: Mapping[str, Any], name: str) -> BertConfig:
    family = FAMILIES[name]
    for key, known in family.fixed.items():
        if given.get(key, known[0]) not in known:
            raise ConfigError(f"{key}={given[key]}; expected {known[0]}; no other is supported")
    fields = {ours: given[theirs] for theirs, ours in family.fields.items() if given.get(theirs) is not None}
    if lacking := [theirs for theirs, ours in list(family.fields.items())[:6] if ours not in fields]:
        raise ConfigError(f"no {', '.join(lacking)}; expected transformers' config.json of {name}")
    config = BertConfig(**{**family.defaults, **fields, "family": name, "attention_dropout": 0.0})
    return replace(config, max_length=config.max_length - config.first_position)


def save_model(model: Bert, folder: str | Path, **more: Any) -> Path:
    """Write `config.json` and `model.safetensors` for transformers, and for `load`.

    Args:
        model: the model; the heads of a fine-tune that it was loaded from are written, too.
        folder: folder, created if missing; files of these names are replaced.
        more: further entries of config.json, such as `pad_token_id`.

    Returns:
        The folder.

    """
    folder, config, heads = Path(folder), model.config, model.heads
    folder.mkdir(parents=True, exist_ok=True)
    family = FAMILIES[config.family]
    prefix = 0 if config.head or heads else len(family.prefix)
    arrays = {name[prefix:]: jnp.asarray(x) for name, x in named(model)} | (heads.arrays if heads else {})
    replace_file(folder / WEIGHTS, save(arrays, {"format": "pt"}))
    described: dict[str, Any] = {"architectures": [family.architectures[0 if config.head else 1]]}
    described |= {name: known[0] for name, known in family.fixed.items()}
    described |= {theirs: getattr(config, ours) for theirs, ours in family.fields.items()}
    described["max_position_embeddings"] += config.first_position
    described |= heads.settings if heads else {}
    replace_file(folder / CONFIG, json.dumps({**described, "dtype": "float32", **more}, indent=1) + "\n")
    return folder
