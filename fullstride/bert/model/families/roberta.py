"""RoBERTa (arXiv:1907.11692): BERT's layers, positions that begin after the padding token's number."""

from dataclasses import replace

from fullstride.bert.model.families import bert

FAMILY = replace(
    bert.FAMILY,
    prefix="roberta.",
    head=("lm_head.",),
    architectures=("RobertaForMaskedLM", "RobertaModel"),
    names={
        **{ours: theirs.replace("bert.", "roberta.") for ours, theirs in bert.FAMILY.names.items()},
        ".head.dense": "lm_head.dense",
        ".head.norm": "lm_head.layer_norm",
        ".head": "lm_head",
    },
    tied={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    layers="roberta.encoder.layer.",
    fixed={**bert.FAMILY.fixed, "model_type": ("roberta",)},
    defaults={"padding": 1},
    pads_positions=True,
)
