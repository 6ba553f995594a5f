"""Attention with documents, slopes, sinks, softcap and dropout from the definition, and cases of each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

B, H = 2, 4
IDS = torch.tensor([[3, 1, 1, 3, 0, 1, 3, 3, 0], [5, 5, 2, 2, 2, 7, 7, 7, 7]])


def defined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    hidden: Any = None,
    added: Any = 0.0,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    factors: Any = 1.0,
) -> Tensor:
    """Exponentials over their sum, term by term: `hidden` is true where a query does not see a key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    terms = (scores + added).exp()
    terms = terms if hidden is None else torch.where(hidden, 0.0, terms)
    total = terms.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks.exp()[:, None, None])
    return torch.einsum("bhij,bhjd->bhid", factors * terms / torch.where(total == 0, 1.0, total), v)


def draw(seed: int, lq: int, lk: int, hk: int = H) -> list[Tensor]:
    """q, k, v in fp64."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, H, lq, 5), (B, hk, lk, 5), (B, hk, lk, 3)
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


def places(lq: int, lk: int) -> tuple[Tensor, Tensor]:
    return torch.arange(lq)[:, None], torch.arange(lk)[None, :]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 30), dtype=torch.float64)


def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A mask_mod of FlexAttention."""
    return (i - j).abs() <= 2 + h + 2 * b


Made = tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]


def bottom_right(lq: int, lk: int, window: tuple[int, int] | None = None) -> Callable[[int], Made]:
    i, j = places(lq, lk)
    last = i + lk - lq
    hidden = (j > last) | ((j < last - window[0]) if window else False)
    return lambda seed: ((lq, lk), {"is_causal": "bottom-right", "window": window}, {"hidden": hidden})


def documents(seed: int) -> Made:
    return (9, 9), {"document_ids": IDS}, {"hidden": (IDS[:, :, None] != IDS[:, None, :])[:, None]}


def causal_documents(seed: int) -> Made:
    i, j = places(9, 9)
    hidden = (IDS[:, :, None] != IDS[:, None, :])[:, None] | (j > i)
    return (9, 9, 2), {"document_ids": IDS, "is_causal": True, "enable_gqa": True}, {"hidden": hidden}


def documents_with_a_bias(seed: int) -> Made:
    bias, apart = numbers(seed, H, 9, 9), (IDS[:, :, None] != IDS[:, None, :])[:, None]
    return (9, 9), {"document_ids": IDS, "attn_mask": bias}, {"hidden": apart, "added": bias}


def slopes(seed: int) -> Made:
    (i, j), s = places(5, 8), numbers(seed, H).abs()
    return (5, 8), {"alibi_slopes": s}, {"added": -s[:, None, None] * (i + 3 - j).abs()}


def slopes_of_samples(seed: int) -> Made:
    (i, j), s = places(7, 7), numbers(seed, B, H).abs()
    seen = (numbers(seed, 7, 7) > -0.7) | (i == j)
    given = {"alibi_slopes": s, "attn_mask": seen}
    return (7, 7), given, {"added": -s[..., None, None] * (i - j).abs(), "hidden": ~seen}


def sinks(seed: int) -> Made:
    return (6, 9, 2), {"sinks": numbers(seed, H), "enable_gqa": True}, {"sinks": numbers(seed, H)}


def causal_sinks(seed: int) -> Made:
    i, j = places(6, 9)
    return (6, 9), {"sinks": numbers(seed, H), "is_causal": True}, {"sinks": numbers(seed, H), "hidden": j > i}


def windowed_sinks(seed: int) -> Made:
    (i, j), mask = places(7, 7), numbers(seed, B, 1, 7, 7)
    hidden = (j < i - 2) | (j > i + 1)
    given = {"sinks": numbers(seed, H), "window": (2, 1), "attn_mask": mask}
    return (7, 7), given, {"sinks": numbers(seed, H), "hidden": hidden, "added": mask}


def causal_bias(seed: int) -> Made:
    (i, j), bias = places(7, 7), numbers(seed, H, 7, 7)
    return (7, 7), {"attn_mask": bias, "window": (-1, 0)}, {"added": bias, "hidden": j > i}


def function_mask(seed: int) -> Made:
    at = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None], *places(7, 11)
    return (7, 11), {"attn_mask": near}, {"hidden": ~near(*at)}


def block_mask(seed: int) -> Made:
    at = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None], *places(21, 34)
    made = create_block_mask(near, B, H, 21, 34, device="cpu", BLOCK_SIZE=16)
    return (21, 34), {"attn_mask": made}, {"hidden": ~near(*at)}


CASES: dict[str, Callable[[int], Made]] = {
    "bottom_right": bottom_right(5, 8),
    "bottom_right_tall": bottom_right(8, 5),
    "bottom_right_square": bottom_right(6, 6),
    "bottom_right_window": bottom_right(5, 8, (4, -1)),
    "bottom_right_narrow": bottom_right(5, 8, (1, -1)),
    "documents": documents,
    "causal_documents": causal_documents,
    "documents_with_a_bias": documents_with_a_bias,
    "slopes": slopes,
    "slopes_of_samples": slopes_of_samples,
    "sinks": sinks,
    "causal_sinks": causal_sinks,
    "windowed_sinks": windowed_sinks,
    "causal_bias": causal_bias,
    "function_mask": function_mask,
    "block_mask": block_mask,
}
# What differs from others in numbers alone, which the plain form and eager mode check.
ALIKE = {
    "bottom_right_tall",
    "bottom_right_square",
    "bottom_right_narrow",
    "documents",
    "documents_with_a_bias",
    "slopes",
    "sinks",
    "causal_bias",
}


def softcap(seed: int) -> Made:
    i, j = places(7, 7)
    given = {"softcap": 0.8, "is_causal": True}
    return (7, 7, 2), {**given, "enable_gqa": True}, {"softcap": 0.8, "hidden": j > i}


def softcap_and_all(seed: int) -> Made:
    (i, j), s = places(9, 9), numbers(seed, H)
    given = {"softcap": 1.5, "sinks": s, "document_ids": IDS, "alibi_slopes": s.abs()}
    apart = (IDS[:, :, None] != IDS[:, None, :])[:, None]
    named = {"softcap": 1.5, "sinks": s, "hidden": apart, "added": -s.abs()[:, None, None] * (i - j).abs()}
    return (9, 9), given, named


PLAIN = {"softcap": softcap, "softcap_and_all": softcap_and_all}
