"""Attention and its derivative in fp64, from the definition; its inputs; tolerances of 16-bit formats."""

import torch
from torch import Tensor

ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def visible(lq: int, lk: int, causal: bool, window: tuple[int, int] | None) -> Tensor:
    """Return the mask of the keys that each query sees."""
    i, j = torch.arange(lq)[:, None], torch.arange(lk)[None, :]
    seen = torch.ones(lq, lk, dtype=torch.bool)
    if causal:
        seen = seen & (j <= i)
    if window and window[0] >= 0:
        seen = seen & (j >= i - window[0])
    if window and window[1] >= 0:
        seen = seen & (j <= i + window[1])
    return seen


def dual_attention(inputs, scale, mask=None, causal=False, window=None):
    """o, to, lse, mu by the library's own derivative of every step of the definition, in fp64."""
    q, k, v, tq, tk, tv = inputs
    group = q.shape[1] // k.shape[1]
    present = [torch.zeros_like(x) if t is None else t for x, t in zip((q, k, v), (tq, tk, tv), strict=True)]
    primals, tangents = ([x.detach().cpu().double() for x in xs] for xs in ((q, k, v), present))
    seen = visible(q.shape[2], k.shape[2], causal, window)
    added = torch.zeros((), dtype=torch.float64)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask.cpu()
    elif mask is not None:
        added = mask.cpu().double()
    alive = (seen & (added != -torch.inf)).any(-1, keepdim=True)

    def weights(q, k):
        scores = scale * q @ k.repeat_interleave(group, 1).mT + added
        return torch.where(alive, scores.masked_fill(~seen & alive, -torch.inf), 0.0)

    def of(q, k, v):
        s = weights(q, k)
        p = torch.softmax(s, -1) * alive
        return p @ v.repeat_interleave(group, 1), s.logsumexp(-1)

    (o, lse), (to, mu), *_ = torch.func.jvp(of, tuple(primals), tuple(tangents))
    dead = ~alive[..., 0].expand(lse.shape)
    return o, to, lse.masked_fill(dead, -torch.inf), mu.masked_fill(dead, 0.0)


def make_inputs(shape, dtype, device="cpu", packed=False):
    """q, k, v and their tangents; `packed` as the (B, H, L, D) views of (B, L, H, D)."""
    b, h, hk, lq, lk, d, dv = shape
    shapes = ((h, lq, d), (hk, lk, d), (hk, lk, dv))
    made = []
    for heads, length, width in shapes * 2:
        size = (b, length, heads, width) if packed else (b, heads, length, width)
        x = torch.randn(size, device=device).to(dtype)
        made.append(x.transpose(1, 2) if packed else x)
    return made


def assert_close(found, expected, dtype, values=1.0):
    """o and to within the rounding of the weights, summed in any order, and of the result; lse and mu as in fp32.

    A weight is off by its own rounding (p, and p tS for `to`), at most twice: relative to the sum of magnitudes, which
    is below the largest value that o and to take for normal inputs, times 4 for the tails of a random draw; scores that
    are `values` times larger are off by as much more. In fp32 the scores, rounded as well, weigh as much: 4 times that.
    """
    o, to, lse, mu = found
    unit = ROUNDING[dtype] * (4 if dtype == torch.float32 else 1)
    for name, x, y, off in (("o", o, expected[0], 8 * unit), ("to", to, expected[1], 24 * unit)):
        if x is not None:
            assert x.dtype == dtype, name
            torch.testing.assert_close(
                x.cpu().double(), y, rtol=off, atol=off * values, msg=lambda m, n=name: f"{n}: {m}"
            )
    fp32 = 64 * ROUNDING[torch.float32]
    for name, x, y in (("lse", lse, expected[2]), ("mu", mu, expected[3])):
        if x is not None:
            assert x.dtype == torch.float32, name
            torch.testing.assert_close(
                x.cpu().double(), y, rtol=fp32, atol=fp32 * values, msg=lambda m, n=name: f"{n}: {m}"
            )
