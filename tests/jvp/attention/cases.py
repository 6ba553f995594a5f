"""Attentions through `fullstride.jvp`, each with a reference in elementary operations."""

import functools
from typing import Any

import torch
from torch import Tensor

from fullstride.jvp import attention
from tests.jvp import plain_ops

# b, h, hk, lq, lk, d, dv
SIZES = {
    "self": (2, 3, 3, 7, 7, 4, 4),
    "cross": (2, 2, 2, 5, 11, 6, 3),
    "one": (1, 2, 2, 1, 3, 2, 2),
    "gqa": (2, 6, 2, 5, 7, 4, 5),
    "mqa": (1, 3, 1, 9, 4, 5, 2),
}


def draw(seed: int, size: str, *, layout=torch.clone, stack: int | None = None) -> list[Tensor]:
    """Draw q, k, v, or `stack` of each if given."""
    g = torch.Generator().manual_seed(seed)
    b, h, hk, lq, lk, d, dv = SIZES[size]
    shapes = [(b, h, lq, d), (b, hk, lk, d), (b, hk, lk, dv)]
    lead = () if stack is None else (stack,)
    return [layout(torch.randn(*lead, *shape, generator=g, dtype=torch.float64)) for shape in shapes]


def mask_for(seed: int, kind: str, size: str) -> Tensor:
    """A mask of that kind: its shape, then whether it is added."""
    b, h, _, lq, lk, *_ = SIZES[size]
    shapes = {
        "keys": (1, lk),
        "matrix": (lq, lk),
        "batch": (b, 1, 1, lk),
        "heads": (1, h, lq, lk),
        "full": (b, h, lq, lk),
    }
    name, _, added = kind.partition("+")
    g = torch.Generator().manual_seed(seed + 50)
    seen = torch.rand(shapes[name], generator=g) < 0.6
    seen[..., 0] = True
    if name in ("matrix", "heads", "full"):
        seen[..., lq // 2, :] = False  # a query that sees nothing
    if not added:
        return seen
    return torch.randn(seen.shape, generator=g, dtype=torch.float64).masked_fill(~seen, -torch.inf)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("self", {}),
    "scale": ("cross", {"scale": 0.7}),
    "one": ("one", {}),
    "causal": ("self", {"is_causal": True}),
    "causal_cross": ("cross", {"is_causal": True}),
    "gqa": ("gqa", {"enable_gqa": True}),
    "mqa_causal": ("mqa", {"enable_gqa": True, "is_causal": True}),
    "bool_keys": ("self", {"attn_mask": "keys"}),
    "bool_matrix": ("cross", {"attn_mask": "matrix"}),
    "bool_batch": ("cross", {"attn_mask": "batch"}),
    "bool_heads_gqa": ("gqa", {"attn_mask": "heads", "enable_gqa": True}),
    "bool_full": ("self", {"attn_mask": "full"}),
    "additive_matrix": ("self", {"attn_mask": "matrix+"}),
    "additive_heads": ("gqa", {"attn_mask": "heads+", "enable_gqa": True, "scale": 1.1}),
    "additive_full": ("cross", {"attn_mask": "full+"}),
    "window": ("self", {"window": (2, 1)}),
    "window_causal": ("self", {"window": (2, -1), "is_causal": True}),
    "window_gqa_mask": ("gqa", {"window": (-1, 1), "enable_gqa": True, "attn_mask": "batch"}),
    "window_past_the_keys": ("mqa", {"window": (1, 0), "enable_gqa": True}),
}


def op_and_reference(name: str, seed: int):
    """Return the op of that case, its reference in elementary operations, and the name of its sizes."""
    size, given = CASES[name]
    options = dict(given)
    if "attn_mask" in options:
        options["attn_mask"] = mask_for(seed, options["attn_mask"], size)
    return functools.partial(attention, **options), functools.partial(plain_ops.attention, **options), size


def weights_for(seed: int, op, primals) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed + 70)
    return list(torch.randn(2, *op(*primals).shape, generator=g, dtype=torch.float64))
