"""BERT (arXiv:1810.04805)."""

from fullstride.bert.model.families.family import Family

FAMILY = Family(
    prefix="bert.",
    head=("cls.predictions.",),
    architectures=("BertForMaskedLM", "BertModel"),
    names={
        ".embeddings.tokens": "bert.embeddings.word_embeddings",
        ".embeddings.positions": "bert.embeddings.position_embeddings",
        ".embeddings.types": "bert.embeddings.token_type_embeddings",
        ".embeddings.norm": "bert.embeddings.LayerNorm",
        ".pooler": "bert.pooler.dense",
        ".head.dense": "cls.predictions.transform.dense",
        ".head.norm": "cls.predictions.transform.LayerNorm",
        ".head": "cls.predictions",
    },
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    layers="bert.encoder.layer.",
    layer={
        "attention.query": "attention.self.query",
        "attention.key": "attention.self.key",
        "attention.value": "attention.self.value",
        "attention.output": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "intermediate": "intermediate.dense",
        "output": "output.dense",
        "output_norm": "output.LayerNorm",
    },
    fields={
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
        "pad_token_id": "padding",
    },
    fixed={
        "model_type": ("bert",),
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute",),
        "tie_word_embeddings": (True,),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
)
