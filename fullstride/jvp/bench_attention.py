"""`fullstride bench jvp-attention`: attention with its derivative, forward and backward, beside what others need.

Of each size the dual forward pass, the backward pass whose tangent is detached, which is the library's problem too, and
the one through the tangent. Beside them `vanilla`, PyTorch's math attention under torch.func.jvp, the library's primal
alone, and jvp_flash_attention where it is installed. Counted in products of 2 B H L^2 D operations: 6, 5 and 15; the
primal alone 2. Errors are of whole heads, of the very tensors that are timed, against the plain form in fp64.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullstride.bench.environment import environment
from fullstride.bench.results import CaseResult, Row, write_result
from fullstride.device import resolve_device
from fullstride.errors import one_of
from fullstride.jvp.attention.op import attention_dual
from fullstride.jvp.bench_attention_gate import NAMES, Dual, Problem, gate
from fullstride.jvp.bench_common import FORMATS, Errors, Setup, by_format, flat, make_setup, show, without_graph
from fullstride.jvp.implementation import chosen as chosen_implementation
from fullstride.jvp.shapes import ERRORS, ODD, REFERENCE, SMALL, SPEED, AttentionShape

COMPARABLE = [shape for shape in ODD if shape.k[2] > 1]  # the score of a single key has no gradient
SHAPES = {"small": SMALL, "reference": REFERENCE, "speed": SPEED, "odd": COMPARABLE}
SHAPES["all"] = [*REFERENCE, *SPEED, *COMPARABLE]
PEER = "jvp_flash_attention"
# Score matrices that vanilla has alive at once, forward and backward, as the table of reference 3 has them.
VANILLA = {"forward": 6, "backward": 14}
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
    """Its documented limits: a GPU, half precision, square, lengths of whole blocks, heads of certain widths."""
    installed = importlib.util.find_spec(PEER) is not None and setup.device.type == "cuda"
    plain = shape.q == shape.k == shape.v and shape.dim in (16, 32, 64, 128, 256) and shape.length % 32 == 0
    return installed and plain and setup.dtype.itemsize == 2


def _libraries(setup: Setup) -> dict[str, Backends]:
    """The library's fused attentions by name; where there is no choice, what it takes by itself."""
    if setup.device.type != "cuda" or setup.dtype.itemsize != 2:
        return {"library": None}
    return {"flash": [SDPBackend.FLASH_ATTENTION], "cudnn": [SDPBackend.CUDNN_ATTENTION]}


def _vanilla_fits(setup: Setup, kind: str, scores: int) -> bool:
    return setup.fits(VANILLA[kind] * scores * setup.dtype.itemsize)


def forward_rows(setup: Setup, problem: Problem, errors: Errors) -> Iterator[Row]:
    """The dual forward pass, ours and others', and the library's primal."""
    shape, moved = problem.shape, problem.bytes
    ways: dict[str, Dual] = {"ours": ours(setup, tangent_grad=False)}
    if _vanilla_fits(setup, "forward", shape.matrix):
        ways["vanilla"] = vanilla
    if _peer_takes(setup, shape):
        ways[PEER] = _peer
    for who, run in ways.items():
        own = {n: errors[n] for n in ("o", "to")} if who == "ours" else {}
        yield setup.row(str(shape), "forward", who, without_graph(run, *problem.inputs), 6 * shape.product, moved, own)
    for who, backends in _libraries(setup).items():
        call = without_graph(library, *problem.inputs[:3], backends)
        yield setup.row(str(shape), "primal", who, call, 2 * shape.product, moved // 2)


def backward_rows(setup: Setup, problem: Problem, detached: Errors, through: Errors) -> Iterator[Row]:
    """The backward pass past the tangent, ours and the library's, and that through it, ours and vanilla's."""
    shape, leaves = problem.shape, problem.leaves()
    primals = {"ours": ours(setup, tangent_grad=False)(*leaves)[0]}
    primals |= {who: library(leaves[0], leaves[1], leaves[2], backends) for who, backends in _libraries(setup).items()}
    for who, o in primals.items():
        own = {n: detached[n] for n in NAMES[:3]} if who == "ours" else {}
        call = _backward((o,), leaves[:3], problem.gradients[:1])
        yield setup.row(str(shape), "detached", who, call, 5 * shape.product, problem.bytes, own)
    ways: dict[str, Dual] = {"ours": ours(setup)}
    if _vanilla_fits(setup, "backward", shape.matrix):
        ways["vanilla"] = vanilla
    for who, run in ways.items():
        own = {n: through[n] for n in NAMES} if who == "ours" else {}
        call = _backward(run(*leaves), leaves, problem.gradients)
        yield setup.row(str(shape), "through", who, call, 15 * shape.product, 2 * problem.bytes, own)


def _backward(outputs: Any, leaves: list[Tensor], gradients: list[Tensor]) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)


def _gate(setup: Setup, problem: Problem, through: bool) -> Errors:
    part = problem.shape.matrix // (problem.shape.batch * problem.shape.k[1])
    eager = vanilla if setup.fits(VANILLA["backward"] * part * 4) else None
    return gate(ours(setup, through), eager, problem, through)


def rows(setup: Setup, shapes: list[AttentionShape]) -> list[Row]:
    """Gate and time each size that fits; the plain form takes matrices of all scores."""
    measured, say = [], Console(stderr=True).print
    for shape in shapes:
        problem = Problem.draw(shape, setup)
        plain = chosen_implementation(setup.implementation, problem.inputs[0]) == "plain"
        if plain and not setup.fits(VANILLA["forward"] * shape.matrix * 4):
            say(f"left out: {shape}, whose {shape.matrix:,} scores are too many for the plain form")
            continue
        say(f"gate: {shape} against fp64")
        through, detached = _gate(setup, problem, through=True), _gate(setup, problem, through=False)
        measured += [*forward_rows(setup, problem, through), *backward_rows(setup, problem, detached, through)]
    return measured


def _errors(setup: Setup) -> Errors:
    return _gate(setup, Problem.draw(ERRORS, setup), through=True)


def run(*, device: str, precision: str, implementation: str, shapes: str | None, out: Path) -> Path:
    """Gate, measure, print the tables and write the JSON, whose path is returned.

    Args:
        device: where.
        precision: bf16, fp16, fp32, tf32 or tf32x3.
        implementation: `auto`, `plain` or `triton`.
        shapes: a list of sizes by name; None is `small` on a processor, else `reference` and `speed`.
        out: the folder of results.

    Returns:
        The file written.

    Raises:
        ConfigError: for a device, format or list that there is not.
        GateError: if a result is wrong.

    """
    chosen = resolve_device(device)
    one_of("--precision", precision, FORMATS)
    if shapes is not None:
        one_of("--shapes", shapes, SHAPES)
    sizes = SHAPES[shapes] if shapes else SMALL if chosen.type == "cpu" else [*REFERENCE, *SPEED]
    setup = make_setup(chosen, precision, implementation)
    errors, measured = by_format(setup, tuple(FORMATS), _errors), rows(setup, sizes)
    conditions = {"precision": precision, "backend": implementation, "shapes": [str(s) for s in sizes]}
    gates = flat(errors)
    result = CaseResult("jvp-attention", chosen.type, conditions, gates, setup.ceilings, measured, environment())
    path = write_result(result, out)
    show(result, errors, "TFLOP/s", lambda row: f"{row.extra['gflop'] / row.timing.median_ms:.3g}", path)
    return path
