"""Arguments beyond SDPA's, and how the kernels take them: as a mask, a window, or one more key.

Documents, slopes of a bias by distance (ALiBi, arXiv:2108.12409) and the masks of FlexAttention become a mask; the
causal triangle of the last query and key becomes a window. A sink (arXiv:2309.17453) is a key whose value is zero and
whose score is given: it comes first, so that a window can still hide the keys after a query. A softcap
(arXiv:2408.00118) and dropout change the softmax itself, which no mask can: they have no kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor

from fullstride.jvp.attention.arguments import check_batch, checked_mask, checked_window
from fullstride.jvp.attention.layout import visible_band

Window = tuple[int, int] | None
BOTTOM_RIGHT = "bottom-right"


class Rules(NamedTuple):
    """What `More` names, with the defaults."""

    document_ids: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None


class More(TypedDict, total=False):
    """Arguments that SDPA does not have: see `attention`."""

    document_ids: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    softcap: float | None
    dropout_p: float
    dropout_seed: int | Tensor | None


class Visible(NamedTuple):
    """What the queries see: a mask, whether only keys up to the query's own, and a window; resolved for the kernels
    there is never a mask and `causal` both.
    """

    mask: Any
    causal: Any
    window: Window


@runtime_checkable
class FlexMask(Protocol):
    """A `BlockMask` of FlexAttention."""

    mask_mod: Callable[..., Tensor]


def check_rules(rules: Rules, q: Tensor, k: Tensor, implementation: str) -> None:
    """Raise unless the rules fit q and k, and the implementation can follow them.

    Raises:
        ValueError: for shapes and numbers that do not fit, and for a rule without a kernel.

    """
    b, h, lq, lk = *q.shape[:3], k.shape[2]
    ids, slopes, sinks, softcap, p, seed = rules
    if ids is not None and (ids.is_floating_point() or tuple(ids.shape) != (b, lq) or lq != lk):
        raise ValueError(
            f"document_ids are {ids.dtype} {tuple(ids.shape)} for {lq} queries and {lk} keys, expected integers "
            f"{(b, lk)}, one of each row of q and k; for queries and keys of different documents pass attn_mask"
        )
    for name, x, shapes in (("alibi_slopes", slopes, ((h,), (b, h))), ("sinks", sinks, ((h,),))):
        if x is not None and (tuple(x.shape) not in shapes or not x.is_floating_point()):
            raise ValueError(f"{name} are {x.dtype} {tuple(x.shape)}, expected a floating dtype, {shapes}")
    if (softcap is not None and softcap <= 0) or not 0 <= p < 1:
        raise ValueError(f"softcap is {softcap} and dropout_p is {p}, expected softcap > 0, or None, and 0 <= p < 1")
    if seed is not None and p == 0:
        raise ValueError("dropout_seed is given and dropout_p is 0; pass dropout_p, or no seed")
    named = [name for name, given in (("softcap", softcap is not None), ("dropout_p", p > 0)) if given]
    if named and implementation != "plain":
        raise ValueError(
            f"{' and '.join(named)} with implementation={implementation!r}: the fused kernels have no such rule; pass "
            "implementation='plain', which is exact and needs memory as large as the scores"
        )


def what_is_seen(
    tensors: Sequence[Tensor], visible: Visible, rules: Rules, implementation: str
) -> tuple[Visible, bool]:
    """Return what the kernels are given for the arguments, and whether any of these is one that SDPA lacks.

    Raises:
        ValueError: for a mask or rule that does not fit, or an unknown `causal`.

    """
    q, k, v = tensors
    mask, causal, window = visible
    if causal not in (True, False, BOTTOM_RIGHT):
        raise ValueError(f"is_causal is {causal!r}, expected True, False or {BOTTOM_RIGHT!r}")
    flex = mask is not None and not isinstance(mask, Tensor)
    ids, slopes, sinks, softcap, p, seed = rules
    none = p == 0 and all(x is None for x in (ids, slopes, sinks, softcap, seed))
    if none and not flex and causal != BOTTOM_RIGHT:
        return visible, False
    check_batch(q, k, v)
    check_rules(rules, q, k, implementation)
    mask = flex_mask(mask, q, k) if flex else mask
    checked_mask(mask, q, k, bool(causal))
    return _resolved(q, k, Visible(mask, causal, window), rules), True


def _resolved(q: Tensor, k: Tensor, visible: Visible, rules: Rules) -> Visible:
    mask, causal, window = visible
    left, right = visible_band(bool(causal), checked_window(window))
    shift = k.shape[2] - q.shape[2] if causal == BOTTOM_RIGHT else 0
    if rules.document_ids is not None:
        ids = rules.document_ids
        mask = _both(mask, (ids[:, :, None] == ids[:, None, :])[:, None])
    if rules.alibi_slopes is not None:
        mask = _both(mask, _by_distance(rules.alibi_slopes, q, k))
    if mask is None and not shift:
        return Visible(None, bool(causal), window)
    if (left < 0 or left >= shift) and (right < 0 or right + shift >= 0):
        return Visible(mask, False, (left - shift if left >= 0 else -1, right + shift if right >= 0 else -1))
    return Visible(_both(mask, band_mask(q, k, (left, right), shift)), False, None)


def _both(mask: Tensor | None, other: Tensor) -> Tensor:
    """One mask of two, each bool or added to the scores."""
    if mask is None:
        return other
    if mask.dtype == other.dtype == torch.bool:
        return mask & other
    if mask.dtype == torch.bool:
        mask, other = other, mask
    return mask.masked_fill(~other, -torch.inf) if other.dtype == torch.bool else mask + other


def _offset(q: Tensor, k: Tensor) -> Tensor:
    """Position of key j less that of query i."""
    queries, keys = (torch.arange(n, device=q.device) for n in (q.shape[2], k.shape[2]))
    return keys - queries[:, None]


def band_mask(q: Tensor, k: Tensor, window: tuple[int, int], shift: int) -> Tensor:
    """Return the mask of the window around key i + shift; a negative side has no limit."""
    offset = _offset(q, k) - shift
    seen = offset >= -window[0] if window[0] >= 0 else torch.ones_like(offset, dtype=torch.bool)
    return seen & (offset <= window[1]) if window[1] >= 0 else seen


def _by_distance(slopes: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """-slope |i + Lk - Lq - j|: the last query is level with the last key."""
    slopes = slopes.to(torch.promote_types(q.dtype, torch.float32))
    distance = (_offset(q, k) - (k.shape[2] - q.shape[2])).abs()
    return -slopes[..., None, None] * distance


def flex_mask(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """The bool mask that a `BlockMask` of FlexAttention, or a function `mask_mod(b, h, q_idx, kv_idx)`, stands for."""
    from torch.nn.attention.flex_attention import create_mask  # takes 60 ms to import

    if not hasattr(mask, "mask_mod"):
        return create_mask(mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2], device=q.device)
    *batch, lq, lk = mask.shape
    if (lq, lk) != (q.shape[2], k.shape[2]):
        lengths = q.shape[2], k.shape[2]
        raise ValueError(f"a BlockMask is of {(lq, lk)}, expected {lengths}; create it for these lengths")
    b, h = [1] * (2 - len(batch)) + batch
    seen = create_mask(mask.mask_mod, b, h, lq, lk, device=q.device)
    if mask.full_kv_num_blocks is not None:  # blocks in which mask_mod is not asked
        whole = type(mask).from_kv_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=mask.BLOCK_SIZE)
        seen = seen | _of_blocks(whole, lq, lk)
    return seen & _of_blocks(mask, lq, lk)


def _of_blocks(mask: Any, lq: int, lk: int) -> Tensor:
    rows, columns = mask.BLOCK_SIZE
    blocks = mask.to_dense().bool().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return blocks[..., :lq, :lk]


def with_sinks(sinks: Tensor | None, keys: list[Any], visible: Visible, q: Tensor) -> tuple[list[Any], Visible]:
    """Put the sink, if there is one, in front of k, v and their tangents, and its score in front of the mask.

    Args:
        sinks: score of each head's sink (H,), or None.
        keys: k, v, and their tangents, or None for one that is absent.
        visible: what is seen of the keys.
        q: queries.

    Returns:
        The longer keys, and what is seen of them.

    """
    if sinks is None:
        return keys, visible
    mask, causal, window = visible
    left, right = visible_band(causal, window)
    if left >= 0:  # whose limit would move on to the sink
        mask, right = _both(mask, band_mask(q, keys[0], (left, right), 0)), -1
    score = sinks.to(torch.promote_types(q.dtype, torch.float32))[:, None, None]
    if mask is None:
        added = score.new_zeros(len(sinks), 1, keys[0].shape[2])
    else:
        added = score.new_zeros(()).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask.to(score.dtype)
    rows = torch.broadcast_shapes(added.shape[:-1], score.shape[:-1])
    mask = torch.cat([score.expand(*rows, 1), added.expand(*rows, keys[0].shape[2])], -1)
    seen = Visible(mask, False, (-1, right + 1 if right >= 0 else -1))
    return [None if x is None else torch.cat([x.new_zeros(*x.shape[:2], 1, x.shape[3]), x], 2) for x in keys], seen
