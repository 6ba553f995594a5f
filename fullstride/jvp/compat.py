"""Calling forms of other JVP attentions, for code that moves over: names, order of arguments and layouts are theirs.

`sdpa_jvp` is called as lumalabs/tvm's, `JVPAttn` and `jvp_attention` as jvp_flash_attention's, `attention_with_tangent`
and `torch_attention_op_withT` as NVlabs/rcm's. All run `fullstride.jvp.attention`, with its limits, not with theirs.
FastGen calls torch's own attention inside `torch.func.jvp`, which `fullstride.jvp.jvp` routes: nothing is renamed.
"""

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from fullstride.jvp.attention.op import attention, attention_dual
from fullstride.jvp.dual import unpack

Heads = Float[Tensor, "b h l d"]
Rows = Float[Tensor, "b l h d"]
Mask = Bool[Tensor, "*#bhqk"] | Float[Tensor, "*#bhqk"]
Pair = tuple[Tensor, Tensor | None]


def sdpa_jvp(q: Heads, k: Float[Tensor, "b h s d"], v: Float[Tensor, "b h s dv"]) -> Float[Tensor, "b h l dv"]:
    """`attention(q, k, v)`, which is right without a tangent, too."""
    return attention(q, k, v)


class FwdOut(NamedTuple):
    """What `JVPAttn.apply` returns: the output, and nothing to save."""

    o: Tensor
    ctx: None


class JVPAttn:
    """`attention` with the arguments of jvp_flash_attention; `warp_specialize` and `USE_TMA` choose nothing here."""

    @staticmethod
    def fwd_dual(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Mask | None = None,
        dropout_p: float = 0.0,
        causal: bool = False,
        sm_scale: float | None = None,
        warp_specialize: bool = True,
        USE_TMA: bool = True,
    ) -> Tensor:
        """Attention of dual tensors (B, H, L, D), or of tensors without a tangent.

        Raises:
            ValueError: for dropout_p > 0, and as `attention`.

        """
        del warp_specialize, USE_TMA
        _refuse(dropout_p=dropout_p)
        return attention(q, k, v, attn_mask=attn_mask, is_causal=causal, scale=sm_scale)

    fwd = fwd_dual

    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_t: Tensor | None = None,
        k_t: Tensor | None = None,
        v_t: Tensor | None = None,
        attn_mask: Mask | None = None,
        dropout_p: float = 0.0,
        causal: bool = False,
        sm_scale: float | None = None,
        warp_specialize: bool = True,
        USE_TMA: bool = True,
    ) -> FwdOut:
        """`fwd_dual` with the tangents, which q, k and v carry as dual tensors, once more.

        Raises:
            ValueError: for a tangent that its tensor does not carry, and as `fwd_dual`.

        """
        for name, x, tangent in (("q_t", q, q_t), ("k_t", k, k_t), ("v_t", v, v_t)):
            if tangent is not None and unpack(x).tangent is None:
                raise ValueError(
                    f"{name} is given and {name[0]} carries no tangent, which would be lost; call attention_dual, or "
                    "call it inside jvp"
                )
        del warp_specialize, USE_TMA
        return FwdOut(JVPAttn.fwd_dual(q, k, v, attn_mask, dropout_p, causal, sm_scale), None)


jvp_attention = JVPAttn.fwd


def attention_with_tangent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    causal: bool = False,
    sm_scale: float | None = None,
    magi_mask: object = None,
) -> Pair:
    """Output and detached tangent of explicit pairs (B, H, L, D): the `_attention.apply` of rCM.

    Raises:
        ValueError: for a magi_mask, and as `attention_dual`.

    """
    if magi_mask is not None:
        raise ValueError("magi_mask is given, expected None; pass it to attention_dual as attn_mask or document_ids")
    return attention_dual(q, k, v, tq, tk, tv, is_causal=causal, scale=sm_scale, tangent_grad=False)


def torch_attention_op_withT(q_withT: Pair, k_withT: Pair, v_withT: Pair) -> Pair:  # noqa: N802
    """Output and detached tangent of pairs (tensor, tangent) of (B, L, H, D), or (B, ..., H, D): as rCM's.

    Raises:
        ValueError: as `attention_dual`.

    """
    lead = q_withT[0].shape[:-2]
    pairs = (q_withT, k_withT, v_withT)
    (q, tq), (k, tk), (v, tv) = ([None if x is None else _by_heads(x) for x in pair] for pair in pairs)
    assert q is not None and k is not None and v is not None  # noqa: PT018
    outs = attention_with_tangent(q, k, v, tq, tk, tv)
    o, to = (None if x is None else x.transpose(1, 2).unflatten(1, lead[1:]) for x in outs)
    assert o is not None
    return o, to


def _by_heads(x: Tensor) -> Tensor:
    return x.flatten(1, -3).transpose(1, 2)


def _refuse(*, dropout_p: float) -> None:
    if dropout_p > 0:
        raise ValueError(
            f"dropout_p is {dropout_p}, expected 0: the fused kernels have no dropout; call fullstride.jvp.attention "
            "with dropout_p and implementation='plain'"
        )
