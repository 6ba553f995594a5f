"""Where each weight of a model lies in the files of Hugging Face's BERT."""

from collections.abc import Iterator
from typing import Any

import jax

from fullstride.bert.model.bert import Bert
from fullstride.bert.model.config import BertConfig

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


def places(config: BertConfig) -> dict[str, str]:
    """Modules by their path in a model, to the names that their weights begin with in a file."""
    layers = {
        f".layers[{i}].{ours}": f"bert.encoder.layer.{i}.{theirs}"
        for i in range(config.layers)
        for ours, theirs in LAYER.items()
    }
    return EMBEDDINGS | layers


def named(model: Bert) -> Iterator[tuple[str, Any]]:
    """Every array of a model under its name in a file, in the model's own order."""
    known = places(model.config)
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        owner, _, field = jax.tree_util.keystr(path).rpartition(".")
        if field != "inference":
            yield f"{known[owner]}.{field}", leaf


def canonical(name: str, bare: bool) -> str:
    """A name as new files have it; `bare` says that the file's encoder has no prefix."""
    for old, new in LEGACY.items():
        name = name.replace(old, new)
    return ENCODER + name if bare and not name.startswith((ENCODER, HEAD)) else name
