"""Checks of attention's arguments."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from fullstride.jvp.implementation import chosen
from fullstride.jvp.subclasses import materialized

PRECISIONS = ("ieee", "tf32", "tf32x3")
# The kernels' widest head.
WIDEST = 256


class AttentionOptions(NamedTuple):
    """Arguments of attention that are not differentiated; an empty precision means torch's at the time of the call."""

    scale: float
    causal: bool
    left: int
    right: int
    precision: str
    implementation: str


def attention_options(
    q: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int] | None,
    precision: str | None,
    implementation: str,
) -> AttentionOptions:
    """Return the settings, with their defaults filled in.

    Raises:
        ValueError: for an unknown window, precision or implementation, or heads too wide for it.

    """
    left, right = checked_window(window)
    if precision not in (*PRECISIONS, None):
        raise ValueError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}, or None for torch's")
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    fits = max(q.shape[-1], v.shape[-1]) <= WIDEST
    if implementation == "triton" and not fits:
        raise ValueError(
            f"head dims are {q.shape[-1]} and {v.shape[-1]}, expected at most {WIDEST} for implementation='triton'"
        )
    return AttentionOptions(factor, causal, left, right, precision or "", chosen(implementation, q, fits))


def checked_window(window: tuple[int, int] | None) -> tuple[int, int]:
    """Return a window's two sides, each negative without a limit.

    Raises:
        ValueError: for another form.

    """
    if window is None:
        return -1, -1
    if not isinstance(window, tuple) or len(window) != 2 or not all(isinstance(side, int) for side in window):
        raise ValueError(
            f"window is {window!r}, expected (left, right): keys that a query sees on each side, -1 for all"
        )
    return window


def check_batch(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k, v have four dimensions and one batch."""
    if not q.ndim == k.ndim == v.ndim == 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"shapes are {_shapes(q, k, v)}, expected (B, H, L, D) with one batch size; expand the smaller tensors"
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def check_packed(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k, v have the three dimensions of packed sequences."""
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"shapes are {_shapes(q, k, v)}, expected (T, H, D): all sequences concatenated")


def check_starts(starts: Tensor, sequences: int, name: str, device: torch.device) -> None:
    """Raise unless `starts` can be the bounds of packed sequences."""
    if starts.dtype != torch.int32 or starts.shape != (sequences + 1,) or starts.device != device:
        raise ValueError(
            f"{name} is {starts.dtype} {tuple(starts.shape)} on {starts.device}, expected torch.int32 "
            f"{(sequences + 1,)} on {device}: the start of each sequence and the end of the last"
        )


def check_heads(q: Tensor, k: Tensor, v: Tensor, heads: int, enable_gqa: bool) -> None:
    """Raise unless q, k, v fit each other; `heads` is the dimension of the heads."""
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device or not q.is_floating_point():
        found = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise ValueError(f"q, k, v are {found}, expected one floating dtype on one device; cast with .to()")
    if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"shapes are {_shapes(q, k, v)}, expected equal head dims of q and k, and as many values as keys"
        )
    many, few = q.shape[heads], k.shape[heads]
    if many != few and not enable_gqa:
        raise ValueError(f"q has {many} heads and k {few}, expected the same number, or enable_gqa=True")
    if few == 0 or many % few:
        raise ValueError(f"q has {many} heads and k {few}, expected q's to be a multiple of k's")


def as_causal(bias: CausalBias, q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor | None, bool]:
    """Return the mask and `is_causal` that mean the same as a causal bias, which has no values in memory."""
    lengths = bias.seq_len_q, bias.seq_len_kv
    first = bias.variant == CausalVariant.UPPER_LEFT or lengths[0] == lengths[1]
    if first and not causal and lengths == (q.shape[-2], k.shape[-2]):
        return None, True
    return materialized("attn_mask", bias), causal


def checked_mask(mask: Tensor | None, q: Tensor, k: Tensor, causal: bool) -> Tensor | None:
    """Return the mask expanded to (B, H, Lq, Lk), without a copy.

    Raises:
        ValueError: for a mask of another shape, dtype or device, or one with is_causal.

    """
    if mask is None:
        return None
    full = (*q.shape[:3], k.shape[2])
    if causal:
        raise ValueError(
            "attn_mask and is_causal are given, expected one; put the causal triangle into attn_mask, or pass "
            "window=(-1, 0), which is the triangle of is_causal=True"
        )
    if (mask.dtype != torch.bool and not mask.is_floating_point()) or mask.device != q.device:
        raise ValueError(
            f"attn_mask is {mask.dtype} on {mask.device}, expected bool (True: seen) or a floating dtype on {q.device}"
        )
    try:
        return mask.expand(full)
    except RuntimeError as error:
        raise ValueError(f"attn_mask is {tuple(mask.shape)}, expected a shape that broadcasts to {full}") from error
