import inspect

import pytest
import torch

from fullstride.jvp import attention_varlen
from tests.jvp import plain_ops
from tests.jvp.attention.cases import weights_for
from tests.jvp.derivatives import check_backward, check_forward, check_transforms, close

STARTS = {"q": [0, 3, 3, 8, 9], "k": [0, 4, 6, 6, 11]}


def packed(seed: int, *, window=None, is_causal=False, gqa=False):
    """Return the op on packed sequences, a reference that takes one sequence at a time, and the tensors."""
    g = torch.Generator().manual_seed(seed)
    hk = 2 if gqa else 4
    shapes = [(9, 4, 5), (11, hk, 5), (11, hk, 3)]
    tensors = [[torch.randn(s, generator=g, dtype=torch.float64) for s in shapes] for _ in range(2)]
    starts_q, starts_k = (torch.tensor(STARTS[n], dtype=torch.int32) for n in "qk")
    options = {"window": window, "is_causal": is_causal, "enable_gqa": gqa, "scale": 0.6}

    def op(q, k, v):
        return attention_varlen(q, k, v, starts_q, starts_k, 5, 5, **options)

    def reference(q, k, v):
        spans = [[slice(*pair) for pair in zip(STARTS[n], STARTS[n][1:], strict=False)] for n in "qk"]
        parts = []
        for at, keys in zip(*spans, strict=True):
            part = [x.transpose(0, 1)[None] for x in (q[at], k[keys], v[keys])]
            parts.append(plain_ops.attention(*part, **options)[0].transpose(0, 1))
        return torch.cat(parts)

    return op, reference, *tensors


PACKED = {"plain": {}, "causal": {"is_causal": True}, "window_gqa": {"window": (1, 2), "gqa": True}}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_each_their_own(name, seed):
    op, reference, primals, tangents = packed(seed, **PACKED[name])
    close(op(*primals), reference(*primals))
    check_forward(op, reference, primals, tangents)
    check_backward(op, reference, primals, tangents, weights_for(seed, reference, primals))
    check_forward(op, reference, primals, [tangents[0], None, None])
    assert not op(*primals)[3:8].any()


def test_transforms_of_packed_sequences(seed):
    op, reference, primals, tangents = packed(seed)
    many = [torch.stack([t, t.cos(), t.square()]) for t in tangents]
    check_transforms(op, reference, primals, many, 3)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (torch.tensor([0, 3, 9]), r"cu_seqlens_q is torch.int64 \(3,\) on cpu, expected torch.int32 \(3,\)"),
        (
            torch.tensor([0, 9], dtype=torch.int32),
            r"cu_seqlens_k is torch.int32 \(3,\) .* expected torch.int32 \(2,\)",
        ),
        (
            torch.tensor([0, 3, 99], dtype=torch.int32),
            r"cu_seqlens_q is \[0, 3, 99\], expected non-decreasing bounds from 0 to the \d+ packed rows",
        ),
        (torch.tensor([4, 3, 9], dtype=torch.int32), r"cu_seqlens_q is \[4, 3, 9\], expected non-decreasing bounds"),
        (torch.tensor([-1, 3, 9], dtype=torch.int32), r"cu_seqlens_q is \[-1, 3, 9\], expected non-decreasing bounds"),
    ],
)
def test_starts_that_do_not_fit_are_refused(starts, message):
    _, _, (q, k, v), _ = packed(0)
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(attention_varlen)(q, k, v, starts, torch.tensor([0, 4, 11], dtype=torch.int32), 9, 11)


def test_padded_sequences_are_refused():
    _, _, (q, k, v), _ = packed(0)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"q \(1, .*, expected \(T, H, D\): all sequences concatenated"):
        inspect.unwrap(attention_varlen)(q[None], k[None], v[None], starts, starts, 4, 4)
