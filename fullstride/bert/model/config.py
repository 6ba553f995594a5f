"""Configuration of a BERT: its family, the sizes of its paper and of its small relatives."""

from dataclasses import dataclass, replace
from typing import Any

from fullstride.bert.model.families import FAMILIES
from fullstride.errors import ConfigError, one_of

ATTENTIONS = ("auto", "cudnn", "xla", "eager")


@dataclass(frozen=True)
class BertConfig:
    """Sizes and constants of a BERT encoder (arXiv:1810.04805), those of BERT-base by default.

    Attributes:
        family: `bert`, or a relative of `fullstride.bert.model.families`.
        max_length: length of the longest row, in tokens.
        types: number of token types ("sentences"); 0 for none.
        padding: number of the padding token; RoBERTa's positions begin after it.
        local_attention: width of ModernBERT's local attention: half of it on each side of a token.
        global_every: of ModernBERT's layers, the first and each so many further has global attention.
        global_theta: base of the rotary embedding (arXiv:2104.09864) in ModernBERT's global layers.
        local_theta: that in its local layers.
        hidden_dropout: share of each sub-layer's output, and of the embeddings, that training drops.
        attention_dropout: share of the attention weights that training drops; the paper's is 0.1. Above 0 it needs
            `attention="eager"`, which holds all attention weights in memory.
        attention: `cudnn` (fused, on NVIDIA GPUs in bf16 and fp16), `xla`, `eager`, or `auto`: eager if attention
            weights are dropped, else cudnn if it can run, else xla if it can (not in fp64, nor in fp16 on a
            CPU), else eager.
        head: whether there is a masked language model's head, tied to the token embedding.
        pooler: whether there is a pooler of the first token, which sentence classification uses.

    """

    vocab_size: int = 30_522
    hidden_size: int = 768
    layers: int = 12
    heads: int = 12
    intermediate_size: int = 3072
    max_length: int = 512
    types: int = 2
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.0
    norm_eps: float = 1e-12
    initializer_std: float = 0.02
    attention: str = "auto"
    head: bool = True
    pooler: bool = False
    family: str = "bert"
    padding: int = 0
    local_attention: int = 128
    global_every: int = 3
    global_theta: float = 160_000.0
    local_theta: float = 10_000.0

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: naming the first that cannot be.

        """
        one_of("family", self.family, FAMILIES)
        for name in ("vocab_size", "hidden_size", "layers", "heads", "intermediate_size", "max_length", "global_every"):
            if not (isinstance(size := getattr(self, name), int) and size >= 1):
                raise ConfigError(f"{name}={size}: expected an integer of 1 or more")
        for name in ("types", "padding", "local_attention"):
            if not (isinstance(size := getattr(self, name), int) and size >= 0):
                raise ConfigError(f"{name}={size}: expected an integer of 0 or more")
        if self.hidden_size % self.heads:
            raise ConfigError(f"hidden_size={self.hidden_size}: expected a multiple of heads={self.heads}")
        if self.pooler and ".pooler" not in FAMILIES[self.family].names:
            raise ConfigError(f"pooler=True: family={self.family} has none; use pooler=False")
        if self.modern and self.hidden_size // self.heads % 2:
            size = self.hidden_size // self.heads
            raise ConfigError(f"hidden_size / heads = {size}: expected an even size, which rotary embeddings need")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= (rate := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={rate}: expected a share in [0, 1)")
        one_of("attention", self.attention, ATTENTIONS)
        if self.attention_dropout and self.attention in ("cudnn", "xla"):
            raise ConfigError(
                f"attention_dropout={self.attention_dropout}: attention={self.attention} drops no weights; use "
                "attention=eager, or attention_dropout=0"
            )

    @property
    def modern(self) -> bool:
        """Tell whether the layers are ModernBERT's."""
        return self.family == "modernbert"

    @property
    def first_position(self) -> int:
        """Row of the position table that a text's first token takes; RoBERTa's rows before it belong to padding."""
        return self.padding + 1 if FAMILIES[self.family].pads_positions else 0

    @classmethod
    def named(cls, name: str, **changes: Any) -> "BertConfig":
        """A size by name; `changes` are fields that differ from it.

        Raises:
            ConfigError: for another name, or a field that cannot be.

        """
        one_of("model", name, SIZES)
        hidden, layers, heads = SIZES[name]
        sizes = cls(hidden_size=hidden, layers=layers, heads=heads, intermediate_size=4 * hidden)
        return replace(sizes, **changes)


# Width, layers and heads: base and large of arXiv:1810.04805, base6 that of arXiv:1910.01108, the others of
# arXiv:1908.08962.
SIZES = {
    "tiny": (128, 2, 2),
    "mini": (256, 4, 4),
    "small": (512, 4, 8),
    "medium": (512, 8, 8),
    "base6": (768, 6, 12),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
}
