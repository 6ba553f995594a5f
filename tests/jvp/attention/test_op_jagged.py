"""Jagged tensors against one sample at a time."""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from fullstride.jvp import attention, attention_dual, jvp
from tests.jvp import plain_ops
from tests.jvp.derivatives import close, torchs

LENGTHS = {"q": [3, 0, 7, 1], "k": [5, 2, 4, 1]}
OFFSETS = {of: torch.tensor([0, *lengths]).cumsum(0) for of, lengths in LENGTHS.items()}
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
free: Any = inspect.unwrap  # without the tests' checks of shapes


def values(seed: int) -> list[Tensor]:
    """q, k, v and their tangents, sample after sample, (T, H, D)."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(11, 4, 5), (12, 2, 5), (12, 2, 3)] * 2
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


def jagged(x: Tensor, of: str) -> Any:
    return torch.nested.nested_tensor_from_jagged(x, OFFSETS[of]).transpose(1, 2)


def all_jagged(tensors: list[Tensor]) -> list[Any]:
    return [jagged(x, of) for x, of in zip(tensors, "qkkqkk", strict=False)]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    split = [x.split(LENGTHS[of]) for x, of in ((q, "q"), (k, "k"), (v, "k"))]
    heads = [[x.transpose(0, 1)[None] for x in xs] for xs in zip(*split, strict=True)]
    return torch.cat([plain_ops.attention(*xs, **options)[0].transpose(0, 1) for xs in heads])  # pyright: ignore


OPTIONS = [{}, {"is_causal": True}, {"window": (2, 1), "scale": 0.4}]


@pytest.mark.parametrize("form", ["auto", "plain"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_samples_are_attended_one_by_one(options, form, seed):
    leaves = [x.requires_grad_() for x in values(seed)]
    pair: Any = functools.partial(attention_dual, **options, enable_gqa=True, implementation=form)
    alone: Any = functools.partial(attention, **options, enable_gqa=True, implementation=form)
    expected = torchs(functools.partial(one_by_one, **options, enable_gqa=True), leaves[:3], leaves[3:])
    found = [x.transpose(1, 2).values() for x in pair(*all_jagged(leaves))]
    out = alone(*all_jagged(leaves)[:3])
    assert out.shape[:2] == (4, 4)
    close((*found, out.transpose(1, 2).values()), (*expected, expected[0]))
    losses = ((o * to.sin()).sum() for o, to in (found, expected))
    close(*(torch.autograd.grad(loss, leaves) for loss in losses))
    past = pair(*all_jagged(leaves), tangent_grad=False)
    assert past[0].requires_grad
    assert not past[1].requires_grad


def test_what_jagged_tensors_lack_is_refused(seed):
    tensors = all_jagged(values(seed))
    q, k, v, tq, *_ = tensors
    for given, named in (({"attn_mask": torch.ones(1, 1).bool()}, "attn_mask"), ({"sinks": torch.ones(4)}, "sinks")):
        with pytest.raises(ValueError, match=f"{named} with jagged tensors, .* pad the samples"):
            free(attention)(q, k, v, enable_gqa=True, **given)
    with pytest.raises(ValueError, match="is_causal='bottom-right' with jagged tensors"):
        free(attention_dual)(q, k, v, tq, is_causal="bottom-right")
    with pytest.raises(ValueError, match="v is .* with the lengths of its own tensor"):
        free(attention)(q, k, jagged(torch.ones(11, 2, 3).double(), "q"), enable_gqa=True)
    with pytest.raises(ValueError, match="k is torch.strided, expected a jagged tensor"):
        free(attention)(q, torch.ones(4, 2, 5, 5).double(), v)
    with pytest.raises(ValueError, match="a primal is a nested tensor, which has no tangent in PyTorch; expected its"):
        jvp(attention, (q, q, q), (tq, tq, tq))
