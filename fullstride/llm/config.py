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


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv:2402.13753): the frequency of each pair divided by a factor of its own.

    A model has one list of factors for sequences up to its original length, and another for longer ones. The keys of a
    sequence that grows beyond that length would all have to be computed anew, so sequences end at that length here.

    Attributes:
        factors: of sequences up to the original length, one for each rotated pair.
        original_max_position: that length, in tokens.
        magnitude: factor of cosines and sines.

    """

    factors: tuple[float, ...]
    original_max_position: int
    magnitude: float


RopeScaling = Llama3Rope | LinearRope | YarnRope | LongRope


# Positions are int32 on devices.
FAR = 2**31


def longest_position(length: int, scaling: RopeScaling | None) -> int:
    """Return the context length of a model: the `length` in its files, or `factor` times that with scaled RoPE."""
    if isinstance(scaling, LinearRope):
        return int(min(length * scaling.factor, FAR))
    if isinstance(scaling, YarnRope):
        return max(length, int(min(scaling.original_max_position * scaling.factor, FAR)))
    if isinstance(scaling, LongRope):
        return min(length, scaling.original_max_position)
    return length


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a model; all of the supported ones are decoders of RMSNorm, gated MLPs, RoPE and GQA.

    A kernel set runs the models whose fields it knows: see `fullstride.llm.kernels.COMPUTED`.

    Attributes:
        architecture: name of its family, a row of `fullstride.llm.families`.
        intermediate_size: inner width of the MLP, or of one expert.
        head_dim: width of one head; not always hidden_size / heads.
        max_position: context length of the model, in tokens.
        tied: whether the output projection is the embedding.
        qk_norm: whether queries and keys are normalized before RoPE, each head by itself.
        wide_qk_norm: whether the norms of queries and keys are over all heads at once.
        qkv_bias: whether the three projections have biases.
        eos: token ids that end a sequence.
        dtype: dtype of the weights, by NumPy's or ml_dtypes' name.
        rotary_dim: elements of a head that RoPE rotates; None for all. The rotated pairs are stored as the first of
            each half, see `fullstride.llm.weights.rows.rotary_order`.
        unrotated: layers without RoPE, by their numbers.
        windows: for each layer the number of tokens that a token sees, itself included, or None for all; empty if
            all layers see all.
        window_theta: base of the RoPE of layers with a window, which is unscaled; None if it is that of all layers.
        pre_norm: whether attention and MLP read the residual stream through a norm.
        post_norm: whether what they add to it goes through a norm.
        exact_norm: whether a norm scales in fp32 and rounds last; otherwise it rounds first.
        norm_offset: what is added to the weights of the norms, in fp32; with `exact_norm` alone.
        activation: `silu` or `gelu_tanh`, the function of the gate; or `swiglu_clamped`, GPT-OSS's of gate and up.
        swiglu_limit: bound of gate and up of the latter.
        output_bias: whether the output projection of attention has a bias.
        sinks: whether each head has a score that takes part in the softmax and has no value (arXiv:2309.17453).
        embedding_scale: factor of embeddings.
        rounded_scale: whether that factor is first rounded to the dtype of the weights.
        residual_scale: factor of what attention and MLP add to the residual stream.
        logit_divisor: divisor of the logits.
        attention_scale: factor of attention's scores; None for head_dim^-0.5.
        attention_cap: c of c tanh(score / c); None for no cap.
        logit_cap: c of c tanh(logit / c); None for no cap.
        experts: number of MLPs of a layer, of which a router chooses some for each token; 0 for one without a router.
        experts_per_token: how many it chooses.
        shared_weights: whether the chosen experts' probabilities are divided by their sum.
        expert_bias: whether the router and the experts' matrices have biases.

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
    rotary_dim: int | None = None
    unrotated: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()
    window_theta: float | None = None
    wide_qk_norm: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    exact_norm: bool = False
    norm_offset: float = 0.0
    activation: str = "silu"
    embedding_scale: float = 1.0
    rounded_scale: bool = False
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    experts: int = 0
    experts_per_token: int = 0
    shared_weights: bool = False
    expert_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    swiglu_limit: float = 7.0

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a token sees in a layer; None for all."""
        return self.windows[layer] if self.windows else None

    @property
    def cache_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers, by their numbers, whose keys and values share blocks; all layers of a group have the same window.

        A group has as many layers as there are of the rarest window, or fewer, so that one pool has blocks for all.
        """
        kinds = dict.fromkeys(self.windows or (None,))
        layers = [[i for i in range(self.layers) if self.window(i) == window] for window in kinds]
        size = min(map(len, layers))
        return tuple(tuple(own[i : i + size]) for own in layers for i in range(0, len(own), size))

    @property
    def cache_windows(self) -> tuple[int | None, ...]:
        """Window of each group of `cache_groups`."""
        return tuple(self.window(group[0]) for group in self.cache_groups)


# Matrices that concatenate several of a layer's parameters.
FUSED = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
}


def expert_names(config: ModelConfig, *parts: str) -> list[str]:
    """Return the names of these matrices of a layer's MLP, one expert after another; without experts, the parts."""
    return [f"experts.{i}.{part}" for i in range(config.experts) for part in parts] if config.experts else list(parts)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters: projections are (out, in), and RoPE rotates the two halves of a head."""
    hidden, heads, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    inner = config.intermediate_size
    mlp: dict[str, tuple[int, ...]] = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if config.expert_bias:
        mlp |= {f"{name}_bias": shape[:1] for name, shape in mlp.items()}
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (heads, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, heads),
        "mlp_norm": (hidden,),
        **{name: mlp[name.rpartition(".")[2]] for name in expert_names(config, *mlp)},
    }
    if not config.pre_norm:
        del layer["attn_norm"], layer["mlp_norm"]
    if config.post_norm:
        layer |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    if config.experts:
        layer["router"] = (config.experts, hidden)
        if config.expert_bias:
            layer["router_bias"] = (config.experts,)
    if config.output_bias:
        layer["o_bias"] = (hidden,)
    if config.sinks:
        layer["sinks"] = (config.heads,)
    if config.qk_norm:
        wide = config.wide_qk_norm
        layer |= {"q_norm": (heads if wide else config.head_dim,), "k_norm": (kv if wide else config.head_dim,)}
    if config.qkv_bias:
        layer |= {"q_bias": (heads,), "k_bias": (kv,), "v_bias": (kv,)}
    shapes = {"embed": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tied:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes | {f"layers.{i}.{name}": shape for i in range(config.layers) for name, shape in layer.items()}


def parameter_count(config: ModelConfig) -> int:
    """Return the number of elements of all parameters."""
    return sum(map(math.prod, parameter_shapes(config).values()))
