"""Problems of the attention benchmark: their implementations, the work of each pass, and errors against fp64."""

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases.jvp.common import Errors, OpSetup, OpWork, error_beside_eager, merged
from benchmarks.cases.jvp.shapes import AttentionShape
from fullstride.jvp.attention.op import attention_dual
from fullstride.measure.gate import require_close

NAMES = ("dq", "dk", "dv", "dtq", "dtk", "dtv")
QUERIES = 1024  # at a time, to bound the fp64 scores
# What is rounded in fp32: weights exp(score - lse), whose exponents are of size 4 to 8 and lose two bits by it; the
# operands of TF32's products, which its tensor cores cut off at 10 bits.
WEIGHT = 2 * torch.finfo(torch.float32).eps
# Another's result that is further from fp64 is wrong, not rounded in another place.
WRONG = 0.1
ROUNDING = {"fp32": WEIGHT, "tf32x3": WEIGHT, "tf32": 2.0**-10}

Dual = Callable[..., tuple[Tensor, Tensor | None]]  # of q, k, v and their tangents
PEER = "jvp_flash_attention"
Backends = list[SDPBackend] | None


@dataclass
class Problem:
    """Tensors of one attention: q, k, v, their tangents, and gradients of the output and its tangent."""

    shape: AttentionShape
    inputs: list[Tensor]
    gradients: list[Tensor]

    @classmethod
    def draw(cls, shape: AttentionShape, setup: OpSetup) -> "Problem":
        """Draw normally distributed tensors."""
        inputs = [setup.randn(*size) for size in (shape.q, shape.k, shape.v) * 2]
        return cls(shape, inputs, [setup.randn(*shape.q[:3], shape.v[3]) for _ in range(2)])

    def leaves(self) -> list[Tensor]:
        """Return the inputs as leaves of a graph."""
        return [x.detach().requires_grad_() for x in self.inputs]

    @property
    def ends(self) -> list[tuple[int, int]]:
        """List the (sample, head) pairs to compare with fp64: the first and the last KV head of the batch."""
        return list(dict.fromkeys([(0, 0), (self.shape.batch - 1, self.shape.k[1] - 1)]))

    def cut(self, tensors: list[Tensor], at: tuple[int, int]) -> list[Tensor]:
        """Cut one KV head of one sample, with its query heads, out of each tensor."""
        (b, head), few = at, self.shape.k[1]
        counts = [x.shape[1] // few for x in tensors]
        return [x[b : b + 1, head * n : (head + 1) * n] for x, n in zip(tensors, counts, strict=True)]

    def part(self, at: tuple[int, int]) -> "Problem":
        """Return the problem of one head."""
        return Problem(self.shape, self.cut(self.inputs, at), self.cut(self.gradients, at))


def exact(problem: Problem, through: bool) -> list[Tensor]:
    """Return outputs, then gradients, in fp64 by the PyTorch implementation."""
    leaves = [x.double().requires_grad_() for x in problem.inputs]
    run = partial(attention_dual, implementation="plain", enable_gqa=True, tangent_grad=through)
    parts = []
    for start in range(0, leaves[0].shape[2], QUERIES):
        rows = slice(start, start + QUERIES)
        q, tq = (leaves[i][:, :, rows] for i in (0, 3))
        o, to = run(q, leaves[1], leaves[2], tq, leaves[4], leaves[5])
        assert to is not None
        asked = (o, to) if through else (o,)
        torch.autograd.backward(asked, [g[:, :, rows].double() for g in problem.gradients[: len(asked)]])
        parts.append((o.detach(), to.detach()))
    outputs = [torch.cat(x, 2) for x in zip(*parts, strict=True)]
    return [*outputs, *(x.grad for x in leaves[: 6 if through else 3] if x.grad is not None)]


def results(run: Dual, problem: Problem, through: bool) -> list[Tensor]:
    """Return outputs, then gradients, by one implementation."""
    leaves = problem.leaves()
    o, to = run(*leaves)
    assert to is not None
    asked = (o, to) if through else (o,)
    found = torch.autograd.grad(asked, leaves[: 6 if through else 3], problem.gradients[: len(asked)])
    return [x.detach() for x in (o, to, *found)]


def gate(run: Dual, eager: Dual | None, problem: Problem, through: bool, precision: str = "") -> Errors:
    """Errors of outputs and gradients, `run`'s and eager's in the same format, of some heads of what will be timed;
    GateError if `run` is wrong; then nothing of this size is timed.
    """
    names, errors, rounding = ("o", "to", *NAMES[: 6 if through else 3]), {}, ROUNDING.get(precision)
    everything = results(run, problem, through)
    for at in problem.ends:
        part = problem.part(at)
        right, found = exact(part, through), problem.cut(everything, at)
        by_eager = [None] * len(names) if eager is None else results(eager, part, through)
        every = zip(names, found, right, by_eager, strict=True)
        errors = merged(
            errors, {n: error_beside_eager(f"{problem.shape} {n}", x, r, e, rounding) for n, x, r, e in every}
        )
    return errors


def of_another(run: Dual, problem: Problem) -> Errors:
    """Return the errors of a peer's outputs, and of its gradients without the tangent, on some of the timed heads.

    They are kept by the name that ours have, in a row of its own.

    GateError if it is wrong; then it is not timed.
    """
    names, errors = ("o", "to", *NAMES[:3]), {}
    everything = results(run, problem, through=False)
    for at in problem.ends:
        every = zip(names, problem.cut(everything, at), exact(problem.part(at), through=False), strict=True)
        found = {n: {"ours": require_close(f"{problem.shape} {n}", x, right, WRONG)} for n, x, right in every}
        errors = merged(errors, found)
    return errors


def ours(setup: OpSetup, tangent_grad: bool = True) -> Dual:
    """Run our op on six tensors."""
    precision = {"fp32": "ieee", "tf32": "tf32", "tf32x3": "tf32x3"}.get(setup.precision)
    options: Any = {"precision": precision, "implementation": setup.implementation, "enable_gqa": True}
    return partial(attention_dual, tangent_grad=tangent_grad, **options)


def library(q: Tensor, k: Tensor, v: Tensor, backends: Backends = None) -> Tensor:
    """Run PyTorch's own attention, without a tangent unless it is the math implementation."""
    with sdpa_kernel(backends) if backends else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def vanilla(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Run PyTorch's math attention under torch.func.jvp."""
    o, to, *_ = torch.func.jvp(partial(library, backends=[SDPBackend.MATH]), inputs[:3], inputs[3:])
    return o, to


def _peer(q: Tensor, k: Tensor, v: Tensor, *tangents: Tensor) -> tuple[Tensor, Tensor | None]:
    from jvp_flash_attention.jvp_attention import JVPAttn  # pyright: ignore[reportMissingImports]

    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip((q, k, v), tangents, strict=True)]
        out = forward_ad.unpack_dual(JVPAttn.fwd_dual(*duals))
        return out.primal, out.tangent


def _peer_takes(setup: OpSetup, shape: AttentionShape) -> bool:
    """Return whether the peer supports a shape: on a GPU, certain head widths, equal lengths in whole blocks."""
    installed = importlib.util.find_spec(PEER) is not None and setup.device.type == "cuda"
    square = shape.q == shape.k == shape.v and shape.dim in (32, 64, 128, 256) and shape.length % 32 == 0
    return installed and square and setup.dtype.itemsize == 2


def dual_ways(setup: OpSetup, shape: AttentionShape, through: bool) -> dict[str, Dual]:
    """Return the implementations by name; only ours and vanilla have a gradient of the tangent."""
    ways = {"ours": ours(setup, through), "vanilla": vanilla}
    return ways | {PEER: _peer} if not through and _peer_takes(setup, shape) else ways


def libraries(setup: OpSetup) -> dict[str, Backends]:
    """Return the library's fused attentions by name; without a choice, the one that it selects itself."""
    if setup.device.type != "cuda" or setup.dtype.itemsize != 2:
        return {"library": None}
    return {"flash": [SDPBackend.FLASH_ATTENTION], "cudnn": [SDPBackend.CUDNN_ATTENTION]}


@dataclass(frozen=True)
class Count:
    """Work of one pass: matrix products, and traffic in units of the inputs (q, k, v) and of the output o."""

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


def work(problem: Problem, kind: str, who: str, errors: Errors | None = None) -> OpWork:
    """Return the work of a row."""
    count = COUNTS["library's" if kind == "detached" and who in ("flash", "cudnn", "library") else kind]
    inputs, outputs = (sum(x.nbytes for x in pair) // 2 for pair in (problem.inputs, problem.gradients))
    size = lambda counts: counts[0] * inputs + counts[1] * outputs  # noqa: E731
    return OpWork(
        *(str(problem.shape), kind, who),
        flops=count.products * problem.shape.product,
        moved=size((count.moved, count.moved)),
        given=size(count.given),
        held=size(count.held),
        needs=MATRICES[kind] * problem.shape.matrix * problem.inputs[0].itemsize if who == "vanilla" else 0,
        errors=errors or {},
    )
