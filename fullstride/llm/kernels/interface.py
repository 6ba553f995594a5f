"""Interface of a kernel set; all of it is called inside a traced step."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int, Num, UInt32

from fullstride.llm.packed.matrix import Weight

# Dtype of a KV cache of e4m3 codes and scales (see `fp8_pool`): as float8_e4m3fn XLA would widen all of it to float16
# at each write.
FP8_POOL = "uint8"


class AttentionShape(NamedTuple):
    """Sizes and constants of attention, in addition to its operands.

    Attributes:
        block: tokens of a block.
        scale: factor of the scores.
        eps: epsilon of the norms of queries and keys.
        window: tokens that a token sees, itself included; None for all.
        cap: c of c tanh(score / c); None for no cap.

    """

    heads: int
    kv_heads: int
    head_dim: int
    block: int
    scale: float
    eps: float
    window: int | None = None
    cap: float | None = None


class QKNorm(NamedTuple):
    """Weights of the norms that queries and keys get before RoPE."""

    q: Float[Array, " head_dim"]
    k: Float[Array, " head_dim"]


class StepBatch(NamedTuple):
    """Tokens of one step: first D rows of one token each, then N tiles of Q tokens of one row each.

    Slots and block tables have a first axis of the groups of `ModelConfig.cache_groups` if there are several; attention
    has those of one group.

    Attributes:
        tokens: ids.
        positions: of each token in its sequence; -1 is padding, which sees nothing.
        slots: where its key and value go; 0 for padding.
        rows: block table of each of the D rows.
        tiles: block table of each of the N tiles.
        cos: cosines of the rotary angles.
        sin: sines of the rotary angles.
        window_cos: cosines of layers with a window, if those have angles of their own.
        window_sin: their sines.
        adapters: slot of the LoRA adapter of each of the D rows and N tiles, -1 for none; None if there are no slots.

    """

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    slots: Int[Array, "*groups T"]
    rows: Int[Array, "*groups D W"]
    tiles: Int[Array, "*groups N W"]
    cos: Float[Array, "T half"]
    sin: Float[Array, "T half"]
    window_cos: Float[Array, "T half"] | None = None
    window_sin: Float[Array, "T half"] | None = None
    adapters: Int[Array, " G"] | None = None


class Sampler(NamedTuple):
    """Sampling inputs of each row, in addition to its logits.

    Attributes:
        position: position of the token to be chosen, which seeds its randomness together with `key`.
        special: whether penalties, biases, a mask or min_tokens apply.
        stops: ids that end the row, -1 for none; not chosen while `position` is below `min_until`.
        counts: occurrences of each id in the output, plus `kernels.xla.sampling.PROMPT` if the prompt has it.
        masks: allowed tokens, token i by bit i % 32 of element i // 32; applied to rows that are `masked`.
        wanted: whether logprobs are requested.

    """

    position: Int[Array, " D"]
    key: UInt32[Array, "D 2"]
    temperature: Float[Array, " D"]
    top_k: Int[Array, " D"]
    top_p: Float[Array, " D"]
    min_p: Float[Array, " D"]
    special: Bool[Array, " D"]
    repetition: Float[Array, " D"]
    presence: Float[Array, " D"]
    frequency: Float[Array, " D"]
    stops: Int[Array, "D S"]
    min_until: Int[Array, " D"]
    slots: Int[Array, " D"]
    counts: Int[Array, "R V"]
    bias_ids: Int[Array, "R B"]
    bias: Float[Array, "R B"]
    masked: Bool[Array, " D"]
    masks: UInt32[Array, "R words"]
    wanted: Bool[Array, " D"]


class Sampled(NamedTuple):
    """Chosen tokens; the logprobs are those of the model itself, and zeros if no row wants them."""

    token: Int[Array, " D"]
    logprob: Float[Array, " D"]
    rank: Int[Array, " D"]
    top: Int[Array, "D K"]
    top_logprobs: Float[Array, "D K"]


class SamplingNeeds(NamedTuple):
    """Sampling settings of a row on the host; `Sampler` has fields of the same names, one element a row.

    One rule decides which program the host runs and what that program skips on the device: both must agree.

    Attributes:
        special: whether penalties, biases, a mask or min_tokens apply.
        wanted: whether logprobs are requested.
        temperature: sampling temperature; 0 is greedy.
        top_k: number of most probable tokens to keep; 0 keeps all.
        top_p: probability mass to keep; 1 keeps all.
        min_p: least probability to keep, relative to the most probable token's; 0 keeps all.

    """

    special: bool
    wanted: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float


def needs_full_sampler(s: Any) -> Any:
    """Return whether a row needs more than a temperature: from `SamplingNeeds`, or elementwise from a `Sampler`."""
    return s.special | s.wanted | ((s.temperature > 0) & truncates(s))


def truncates(s: Any) -> Any:
    """Return whether top_k, top_p or min_p excludes tokens, if tokens are drawn at all."""
    return (s.top_k > 0) | (s.top_p < 1) | (s.min_p > 0)


class Project(Protocol):
    """x W^T: after an RMSNorm if `norm`, a SwiGLU (x holds gate and up) if `gated`; plus `bias`, plus `residual`."""

    def __call__(
        self,
        x: Float[Array, "T wide"],
        weight: Weight,
        *,
        norm: tuple[Float[Array, " inner"], float] | None = None,
        gated: bool = False,
        bias: Float[Array, " out"] | None = None,
        residual: Float[Array, "T out"] | None = None,
        exact: bool = False,
    ) -> Float[Array, "T out"]: ...


class Attention(Protocol):
    """Normalize q and k, apply RoPE, store keys and values in `layer` of the KV cache, and attend by block tables.

    A KV cache of the dtype `FP8_POOL` has e4m3 codes with scales; each token attends to its own rounded key
    and value, too.
    `sinks` are a score of each head that takes part in the softmax and has no value.
    """

    def __call__(
        self,
        qkv: Float[Array, "T wide"],
        pool: Num[Array, "layers 2 slots kv_heads head_dim"],
        layer: Int[Array, ""],
        batch: StepBatch,
        norms: QKNorm | None,
        shape: AttentionShape,
        *,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "T out"], Num[Array, "layers 2 slots kv_heads head_dim"]]: ...


# Choose a token for each row; report this many most probable tokens if logprobs are requested.
Sample = Callable[[Float[Array, "D V"], Sampler, int], Sampled]
# Return logprob and rank of given tokens, and this many most probable ones.
Score = Callable[[Float[Array, "D V"], Int[Array, " D"], int], Sampled]


class FusedStep(NamedTuple):
    """Decode step of few rows as one operation.

    Attributes:
        rows: number of rows, at most.
        pack: function from the model's weights to the operation's own layout.
        scratch: function from a number of rows to the initial scratch memory of the operation.
        logits: function of (packed, embed, pool, scratch, batch, block) to the logits, the new pool and scratch.

    """

    rows: int
    pack: Callable[[Any], Any]
    scratch: Callable[[int], Array]
    logits: Callable[[Any, Any, Array, Array, StepBatch, int], tuple[Array, Array, Array]]


class FusedLayers(NamedTuple):
    """Layers of a decode step as one operation.

    Attributes:
        rows: number of rows, at most.
        run: function of (weights, embeddings, pool, batch, block) to the last layer's output and the new pool.

    """

    rows: int
    run: Callable[[Any, Array, Array, StepBatch, int], tuple[Array, Array]]


# Name of the mesh axis over which the model is sharded.
AXIS = "tensor"


class Kernels(NamedTuple):
    """Kernel set: implementations of the operations of a step.

    Attributes:
        dynamic: whether the work of a step follows the context lengths at run time, so that one program serves all.
        fused_step: replacement of all operations in decode steps of few rows.
        fused_layers: replacement of `project` and `attention` in the layers of decode steps.
        static_burst: whether bursts of rows that need at most a temperature are separate programs, because a GPU's host
            reads each condition of a step before the next operation.
        axis: mesh axis whose devices each run a share of every layer; None on one device.
        all_reduce: sum over these devices; XLA's own if None.
        tiled: whether `project` reads packed matrices best in tiles; see `fullstride.llm.packed.formats`.

    """

    name: str
    dynamic: bool
    project: Project
    attention: Attention
    sample: Sample
    score: Score
    fused_step: FusedStep | None = None
    fused_layers: FusedLayers | None = None
    static_burst: bool = False
    axis: str | None = None
    all_reduce: Callable[[Array], Array] | None = None
    tiled: bool = False
