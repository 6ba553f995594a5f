"""Configuration of a decoder-only transformer, independent of the file format it was read from."""

import math
from dataclasses import dataclass

# Of weights.
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's scaling of rotary frequencies: low ones divided by `factor`, high ones unchanged, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class LinearRope:
    """Positions, and so all frequencies, divided by `factor` (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class YarnRope:
    """YaRN (arXiv:2309.00071): low frequencies divided by `factor`, high ones unchanged, a ramp in between.

    Attributes:
        fast: turns in the original length from which on a frequency is unchanged.
        slow: turns in the original length up to which a frequency is divided.
        magnitude: factor of cosines and sines.
        whole: whether the ramp begins and ends at whole pairs.

    """

    factor: float
    original_max_position: int
    fast: float = 32.0
    slow: float = 1.0
    magnitude: float = 1.0
    whole: bool = True


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor for cosines and sines: 0.1 scale ln(factor) + 1 (arXiv:2309.00071, equation 22)."""
    return 0.1 * scale * math.log(max(factor, 1.0)) + 1.0


RopeScaling = Llama3Rope | LinearRope | YarnRope


# Positions are int32 on devices.
FAR = 2**31


def longest_position(length: int, scaling: RopeScaling | None) -> int:
    """Return the context length of a model: the `length` in its files, or `factor` times that with scaled RoPE."""
    if isinstance(scaling, LinearRope):
        return int(min(length * scaling.factor, FAR))
    if isinstance(scaling, YarnRope):
        return max(length, int(min(scaling.original_max_position * scaling.factor, FAR)))
    return length


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a model; all of the supported ones are pre-norm, RMSNorm, SwiGLU, RoPE, GQA decoders.

    Attributes:
        architecture: name of its family, a row of `fullstride.llm.families`.
        head_dim: width of one head; not always hidden_size / heads.
        max_position: context length of the model, in tokens.
        tied: whether the output projection is the embedding.
        qk_norm: whether queries and keys are normalized over head_dim before RoPE.
        qkv_bias: whether the three projections have biases.
        eos: token ids that end a sequence.
        dtype: dtype of the weights, by NumPy's or ml_dtypes' name.

    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-6
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    eos: tuple[int, ...] = ()
    bos: int | None = None
    dtype: str = "bfloat16"


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters: projections are (out, in), and RoPE rotates the two halves of a head."""
    hidden, heads, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (heads, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, heads),
        "mlp_norm": (hidden,),
        "gate": (config.intermediate_size, hidden),
        "up": (config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
    }
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.qkv_bias:
        layer |= {"q_bias": (heads,), "k_bias": (kv,), "v_bias": (kv,)}
    shapes = {"embed": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tied:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes | {f"layers.{i}.{name}": shape for i in range(config.layers) for name, shape in layer.items()}


def parameter_count(config: ModelConfig) -> int:
    """Return the number of elements of all parameters."""
    return sum(map(math.prod, parameter_shapes(config).values()))
