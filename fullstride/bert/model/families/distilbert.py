"""DistilBERT (arXiv:1910.01108): BERT's layers without token types and pooler."""

from fullstride.bert.model.families.family import Family

FAMILY = Family(
    prefix="distilbert.",
    head=("vocab_",),
    architectures=("DistilBertForMaskedLM", "DistilBertModel"),
    names={
        ".embeddings.tokens": "distilbert.embeddings.word_embeddings",
        ".embeddings.positions": "distilbert.embeddings.position_embeddings",
        ".embeddings.norm": "distilbert.embeddings.LayerNorm",
        ".head.dense": "vocab_transform",
        ".head.norm": "vocab_layer_norm",
        ".head": "vocab_projector",
    },
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    layers="distilbert.transformer.layer.",
    layer={
        "attention.query": "attention.q_lin",
        "attention.key": "attention.k_lin",
        "attention.value": "attention.v_lin",
        "attention.output": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "intermediate": "ffn.lin1",
        "output": "ffn.lin2",
        "output_norm": "output_layer_norm",
    },
    fields={
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "n_layers": "layers",
        "n_heads": "heads",
        "hidden_dim": "intermediate_size",
        "max_position_embeddings": "max_length",
        "dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "initializer_range": "initializer_std",
        "pad_token_id": "padding",
    },
    fixed={
        "model_type": ("distilbert",),
        "activation": ("gelu",),
        "sinusoidal_pos_embds": (False, True),
        "tie_word_embeddings": (True,),
    },
    defaults={"types": 0},
)
