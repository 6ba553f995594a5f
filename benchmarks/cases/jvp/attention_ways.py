"""Ways to compute attention with its derivative that the attention bench compares, and what each pass counts."""

import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases.jvp.attention_gate import Dual, Problem
from benchmarks.cases.jvp.common import Setup, Work
from benchmarks.cases.jvp.errors import Errors
from benchmarks.cases.jvp.shapes import AttentionShape
from fullstride.jvp.attention.op import attention_dual

PEER = "jvp_flash_attention"
Backends = list[SDPBackend] | None


def ours(setup: Setup, tangent_grad: bool = True) -> Dual:
    """Our op on six tensors."""
    precision = {"fp32": "ieee", "tf32": "tf32", "tf32x3": "tf32x3"}.get(setup.precision)
    options: Any = {"precision": precision, "implementation": setup.implementation, "enable_gqa": True}
    return partial(attention_dual, tangent_grad=tangent_grad, **options)


def library(q: Tensor, k: Tensor, v: Tensor, backends: Backends = None) -> Tensor:
    """PyTorch's own attention, without a tangent unless it is the math one."""
    with sdpa_kernel(backends) if backends else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def vanilla(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's math attention under torch.func.jvp."""
    o, to, *_ = torch.func.jvp(partial(library, backends=[SDPBackend.MATH]), inputs[:3], inputs[3:])
    return o, to


def _peer(q: Tensor, k: Tensor, v: Tensor, *tangents: Tensor) -> tuple[Tensor, Tensor | None]:
    from jvp_flash_attention.jvp_attention import JVPAttn  # pyright: ignore[reportMissingImports]

    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip((q, k, v), tangents, strict=True)]
        out = forward_ad.unpack_dual(JVPAttn.fwd_dual(*duals))
        return out.primal, out.tangent


def _peer_takes(setup: Setup, shape: AttentionShape) -> bool:
    """Its documented limits: a GPU, heads of certain widths, as many keys as queries, in whole blocks."""
    installed = importlib.util.find_spec(PEER) is not None and setup.device.type == "cuda"
    square = shape.q == shape.k == shape.v and shape.dim in (32, 64, 128, 256) and shape.length % 32 == 0
    return installed and square and setup.dtype.itemsize == 2


def dual_ways(setup: Setup, shape: AttentionShape, through: bool) -> dict[str, Dual]:
    """Ours and the others by name; only vanilla's tangent, beside ours, has a gradient."""
    ways = {"ours": ours(setup, through), "vanilla": vanilla}
    return ways | {PEER: _peer} if not through and _peer_takes(setup, shape) else ways


def libraries(setup: Setup) -> dict[str, Backends]:
    """The library's fused attentions by name; where there is no choice, what it takes by itself."""
    if setup.device.type != "cuda" or setup.dtype.itemsize != 2:
        return {"library": None}
    return {"flash": [SDPBackend.FLASH_ATTENTION], "cudnn": [SDPBackend.CUDNN_ATTENTION]}


@dataclass(frozen=True)
class Count:
    """What a pass counts, in q, k and v together, called inputs, and in o."""

    products: int  # of all scores with queries, keys or values, 2 B H Lq Lk D operations each
    moved: int  # how often inputs and o must be read or written
    # How often inputs, and how often o, there are before the forward pass, gradients of outputs included.
    given: tuple[int, int]
    held: tuple[int, int]  # how often inputs, and how often o, there are at its end


COUNTS = {
    "forward": Count(6, 2, (2, 0), (2, 2)),
    "primal": Count(2, 1, (1, 0), (1, 1)),
    "detached": Count(5, 2, (2, 1), (3, 2)),  # the inputs' tangents are there, but not read, and the output's is gone
    "library's": Count(5, 2, (1, 1), (2, 2)),
    "through": Count(15, 4, (2, 2), (4, 4)),
}
# Matrices of all scores that vanilla has alive at once, as the table of reference 3 has them.
MATRICES = {"forward": 6, "detached": 14, "through": 14}


def work(problem: Problem, kind: str, who: str, errors: Errors | None = None) -> Work:
    """A row's work."""
    count = COUNTS["library's" if kind == "detached" and who in ("flash", "cudnn", "library") else kind]
    inputs, outputs = (sum(x.nbytes for x in pair) // 2 for pair in (problem.inputs, problem.gradients))
    size = lambda counts: counts[0] * inputs + counts[1] * outputs  # noqa: E731
    return Work(
        *(str(problem.shape), kind, who),
        flops=count.products * problem.shape.product,
        moved=size((count.moved, count.moved)),
        given=size(count.given),
        held=size(count.held),
        needs=MATRICES[kind] * problem.shape.matrix * problem.inputs[0].itemsize if who == "vanilla" else 0,
        errors=errors or {},
    )
