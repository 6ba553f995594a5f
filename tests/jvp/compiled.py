"""Checks of compiled functions, in a process for each: a failed trace leaves forward AD's level entered."""

import functools
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import Unsupported
from torch.func import grad, jacfwd, vmap
from torch.nn.attention.bias import causal_upper_left

from fullstride import jvp as ours
from fullstride.jvp import jvp
from tests.jvp import plain_ops
from tests.jvp.attention.rules import ALIKE, CASES, PLAIN, defined
from tests.jvp.attention.rules import draw as rule_points
from tests.jvp.derivatives import Call, Points, close, gradients, torchs
from tests.jvp.networks import random_network, random_points

torch.set_num_threads(1)
BIAS = causal_upper_left(5, 5)
# One of each kind of arguments: places, numbers of tokens, a parameter, a function.
FEW = ("bottom_right_window", "causal_documents", "causal_sinks", "block_mask")


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Normal points in fp64."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


def pair(through: bool, f: Call, primals: Points, tangents: Points) -> tuple[Tensor, ...]:
    """Compute jvp of lists."""
    return jvp(f, tuple(primals), tuple(tangents), tangent_grad=through)


def compare(
    op: Call,
    reference: Call,
    primals: Points,
    backend: str,
    absent: str = "",
    throughs: tuple[bool, ...] = (True, False),
    alone: bool = True,
) -> None:
    """Values and gradients, through the tangent and past it; the tangents named by number are absent.

    The gradients through the tangent are of a loss that no other values have; past it, `alone` computes values without
    a graph of gradients, too.
    """
    g = torch.Generator().manual_seed(9)
    there = [str(i) not in absent for i in range(len(primals))]
    drawn = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in primals]
    tangents = [t if is_there else None for t, is_there in zip(drawn, there, strict=True)]
    expected = torchs(reference, primals, tangents)
    weights = list(torch.randn(2, *expected[0].shape, generator=g, dtype=torch.float64))
    for through in throughs:
        torch._dynamo.reset()  # else it would count each case as one more recompilation
        way: Callable = torch.compile(functools.partial(pair, through), fullgraph=True, backend=backend)
        if alone and not through:
            close(tuple(way(op, primals, tangents)), expected)
        found = gradients(op, way, primals, tangents, weights, through)
        close(found, gradients(reference, torchs, primals, tangents, weights, through))


def attention(backend: str) -> None:
    """Masks, heads, windows, absent tangents, a view as primal, packed sequences."""
    qkv = draw((2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3))
    mask = torch.arange(35).reshape(5, 7) % 3 > 0
    cases: list[tuple[dict[str, Any], str]] = [({"attn_mask": mask}, ""), ({"is_causal": True, "scale": 0.7}, "12")]
    cases += [({"window": (2, 1)}, "1"), ({"attn_mask": mask.double()}, "0")]
    every: dict[str, Any] = {"enable_gqa": True}
    for i, (options, absent) in enumerate(cases):
        op, reference = (functools.partial(f, **every, **options) for f in (ours.attention, plain_ops.attention))
        compare(op, reference, qkv, backend, absent, throughs=(i % 2 == 0,))
    cut = lambda f: lambda x: f(*(x[i : i + 2] for i in range(3)))  # noqa: E731
    compare(cut(ours.attention), cut(plain_ops.attention), draw((4, 2, 5, 6)), backend, throughs=(True,))
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = lambda q, k, v: ours.attention_varlen(q, k, v, starts, starts, 3, 3)  # noqa: E731
    parts = lambda x: [x[at].transpose(0, 1)[None] for at in (slice(0, 2), slice(2, 5))]  # noqa: E731

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = [plain_ops.attention(*x)[0].transpose(0, 1) for x in zip(parts(q), parts(k), parts(v), strict=True)]
        return torch.cat(outs)

    compare(packed, one_by_one, draw(*[(5, 2, 6)] * 3), backend, throughs=(False,))
    library = torch.compile(ours.attention, fullgraph=True, backend=backend)
    q, k, v = draw(*[(2, 2, 5, 6)] * 3)
    assert torch.equal(library(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert torch.equal(library(k.clone().requires_grad_(), k, v), F.scaled_dot_product_attention(k, k, v))
    plain = torch.compile(functools.partial(ours.attention, window=(2, 1)), fullgraph=True, backend=backend)
    found, expected = (
        torch.autograd.grad(f(q.requires_grad_(), k, v).sin().sum(), q)
        for f in (plain, functools.partial(plain_ops.attention, window=(2, 1)))
    )
    close(found, expected)


def masks(backend: str) -> None:
    """Check a bias with a gradient that is computed in the function, and one that is a tensor subclass."""
    bias, q, weight = draw((3, 5, 5), (2, 3, 5, 8), (8, 8))
    for through in (True, False):

        def loss(f: Call, way: Callable, bias: Tensor, weight: Tensor, through: bool = through) -> Tensor:
            out, tangent = way(lambda q: f(q @ weight, q, q.sin(), attn_mask=bias * 1), (q,), (q.cos(),))
            return (out * (tangent if through else tangent.detach()).sin()).sum()

        traced = torch.compile(loss, fullgraph=True, backend=backend)
        learned = bias.requires_grad_(), weight.requires_grad_()
        way: Callable = functools.partial(jvp, tangent_grad=through)
        found = torch.autograd.grad(traced(ours.attention, way, *learned), learned)
        close(found, torch.autograd.grad(loss(plain_ops.attention, torch.func.jvp, *learned), learned))
    causal: Callable = lambda q: jvp(lambda q: ours.attention(q, q, q, attn_mask=BIAS), (q,), (q.cos(),))  # noqa: E731
    found = torch.compile(causal, fullgraph=True, backend=backend)(q)
    close(found, torchs(functools.partial(plain_ops.attention, is_causal=True), [q] * 3, [q.cos()] * 3))


def rules(backend: str) -> None:
    """Check one of each kind of arguments beyond SDPA's, and all of them in the plain form."""
    each_rule([*((name, "auto") for name in FEW), ("softcap_and_all", "plain")], backend)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = lambda q, k, v: ours.attention_varlen(q, k, v, starts, starts, 3, 3, implementation="plain")  # noqa: E731
    compare(packed, packed, draw(*[(5, 2, 6)] * 3), backend, throughs=(False,), alone=False)
    jagged(backend)


def more_rules(backend: str) -> None:
    """Check the other arguments beyond SDPA's, and dropout."""
    others = [(name, "auto") for name in CASES if name not in (*ALIKE, *FEW)]
    each_rule([*others, ("causal_sinks", "plain")], backend)
    options = {"implementation": "plain", "dropout_p": 0.4, "dropout_seed": torch.tensor(5)}
    dropped = functools.partial(ours.attention, **options)
    compare(dropped, dropped, rule_points(4, 5, 7), backend, throughs=(True,))


def each_rule(forms: list[tuple[str, str]], backend: str) -> None:
    """Compare attention with arguments, by their names, of a form."""
    for i, (name, form) in enumerate(forms):
        lengths, given, named = (CASES | PLAIN)[name](3)
        op = functools.partial(ours.attention, implementation=form, **given)
        compare(
            op,
            functools.partial(defined, **named),
            rule_points(4, *lengths),
            backend,
            throughs=(i % 2 == 0,),
            alone=i == 1,
        )


def jagged(backend: str) -> None:
    """Check jagged tensors, between two graphs; one graph is refused by name."""
    offsets = torch.tensor([0, 3, 3, 5])

    def call(*packed: Tensor) -> Tensor:
        q, *rest = (torch.nested.nested_tensor_from_jagged(x.sin(), offsets).transpose(1, 2) for x in packed)
        outs: Any = ours.attention_dual(q, *rest, is_causal=True)
        return torch.cat([x.transpose(1, 2).values() for x in outs]).cos()

    leaves = [x.requires_grad_() for x in draw(*[(5, 2, 6)] * 6)]
    torch._dynamo.reset()
    losses = [f(*leaves).sum() for f in (torch.compile(call, backend=backend), call)]
    close(*(torch.autograd.grad(loss, leaves) for loss in losses))
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="attention_varlen of their values"):
        torch.compile(call, backend=backend, fullgraph=True)(*leaves)


def norms(backend: str) -> None:
    """Each norm."""
    rows, images = draw((2, 5, 7), (7,), (7,)), draw((2, 6, 3, 5), (6,), (6,))
    compare(ours.layer_norm, plain_ops.layer_norm, rows, backend)
    compare(ours.rms_norm, plain_ops.rms_norm, rows[:2], backend, absent="1", throughs=(True,))
    modulated = draw((2, 5, 7), (2, 7), (2, 7))
    compare(ours.ada_layer_norm, plain_ops.ada_layer_norm, modulated, backend, throughs=(False,))
    grouped = lambda f: lambda x, w, b: f(x, 3, w, b, act="silu")  # noqa: E731
    compare(grouped(ours.group_norm), grouped(plain_ops.group_norm), images, backend, absent="1", throughs=(True,))


def formats(backend: str, more: bool = False) -> None:
    """A norm of rows and one of images of bf16 with fp32 parameters under autocast, in bf16: as in eager mode."""
    rows, images, modulated = (
        draw(*s) for s in (((2, 5, 7), (7,), (7,)), ((2, 6, 3, 5), (6,), (6,)), ((2, 5, 7), (2, 7), (2, 7)))
    )
    grouped = lambda x, w, b, **how: ours.group_norm(x, 3, w, b, act="silu", **how)  # noqa: E731
    cases = [(ours.rms_norm, rows[:2]), (grouped, images)]
    if more:
        cases = [(ours.layer_norm, rows), (ours.ada_layer_norm, modulated)]
    for op, drawn in cases:
        torch._dynamo.reset()
        primals = [x.bfloat16() if i == 0 else x.float() for i, x in enumerate(drawn)]
        tangents = [x.cos() for x in primals]
        call: Any = functools.partial(pair, True, functools.partial(op, dtype=torch.bfloat16))
        weights = [x.double() for x in (primals[0].cos(), primals[0].exp())]
        way: Callable = lambda f, p, t: f(p, t)  # noqa: E731
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = (
                f(primals, tangents) for f in (torch.compile(call, fullgraph=True, backend=backend), call)
            )
            assert all(x.dtype == torch.bfloat16 for x in (*found, *expected))
            torch.testing.assert_close(found, expected)
            traced = torch.compile(call, fullgraph=True, backend=backend)
            got, want = (gradients(f, way, primals, tangents, weights, True) for f in (traced, call))
        assert [g.dtype for g in got] == [x.dtype for x in (*primals, *tangents)]
        torch.testing.assert_close(got, want)


def more_formats(backend: str) -> None:
    """Check the other norms in bf16."""
    formats(backend, more=True)


def explicit(backend: str) -> None:
    """Check each norm in pair form, without a transform: with and without gradients through the tangent."""
    drawn = draw((2, 6, 7), (7,), (7,), (6,), (6,), (2, 7), (2, 7), (2, 6))
    x, row, column, modulation, shift = drawn[0], drawn[1:3], drawn[3:5], drawn[5:7], drawn[7]
    grouped = lambda x, w, b, *t, **how: ours.group_norm_dual(x, 3, w, b, *t, act="silu", **how)  # noqa: E731
    shifted = lambda x, w, b, s, *t, **how: grouped(x, w, b, *t[:3], shift=s, tshift=t[3], **how)  # noqa: E731
    reference_of_shifted = lambda x, w, b, s: plain_ops.group_norm(x + s[..., None], 3, w, b, act="silu")  # noqa: E731
    cases: list[tuple[Callable, Call, Points, str]] = [
        (ours.layer_norm_dual, plain_ops.layer_norm, [x, *row], ""),
        (ours.rms_norm_dual, plain_ops.rms_norm, [x, row[0]], "0"),
        (ours.ada_layer_norm_dual, plain_ops.ada_layer_norm, [x, *modulation], "1"),
        (grouped, lambda x, w, b: plain_ops.group_norm(x, 3, w, b, act="silu"), [x, *column], "12"),
        (shifted, reference_of_shifted, [x, *column, shift], "1"),
    ]
    for number, (pairs, reference, primals, absent) in enumerate(cases):
        tangents = [None if str(i) in absent else p.sin() for i, p in enumerate(primals)]
        for through in (number % 2 == 0,):
            torch._dynamo.reset()
            call = functools.partial(pairs, tangent_grad=through)
            traced = torch.compile(call, fullgraph=True, backend=backend)
            way: Callable = lambda _, p, t, traced=traced: traced(*p, *t)  # noqa: E731
            close(way(None, primals, tangents), torchs(reference, primals, tangents))
            weights = [x.cos(), x.exp()]
            expected = gradients(reference, torchs, primals, tangents, weights, through)
            close(gradients(reference, way, primals, tangents, weights, through), expected)


def networks(backend: str) -> None:
    """Whole networks, their parameters' gradients too: the prediction's loss against a detached tangent."""
    for name in ("transformer", "block"):
        network(name, backend)


def network(name: str, backend: str) -> None:
    """One of them."""
    nets = random_network(name), random_network(name, plain_ops)
    primals, tangents = random_points(name, 0)

    def loss(net: Any, transform: Any, primals: Any, tangents: Any) -> Tensor:
        u, dudt, *_ = transform(net, primals, tangents)
        return (u - dudt.detach()).square().sum()

    traced = torch.compile(loss, fullgraph=True, backend=backend)(nets[0], jvp, primals, tangents)
    expected = loss(nets[1], torch.func.jvp, primals, tangents)
    close(traced, expected)
    pairs = [
        torch.autograd.grad(total, list(net.parameters())) for total, net in ((traced, nets[0]), (expected, nets[1]))
    ]
    close(*pairs)


def checkpointed(backend: str) -> None:
    """Check a network whose activations are recomputed."""
    nets = random_network("transformer"), random_network("transformer", plain_ops)
    primals, tangents = random_points("transformer", 0)

    def loss(net: Any, run: Callable, transform: Any) -> Tensor:
        u, dudt, *_ = transform(lambda *x: run(net, *x).sin(), primals, tangents)
        return (u - dudt.detach()).square().sum()

    traced = torch.compile(loss, fullgraph=True, backend=backend)(nets[0], ours.checkpoint, jvp)
    expected = loss(nets[1], lambda net, *x: net(*x), torch.func.jvp)
    close(traced, expected)
    totals = (traced, nets[0]), (expected, nets[1])
    close(*(torch.autograd.grad(total, list(net.parameters())) for total, net in totals))


def representatives(backend: str) -> None:
    """Check one of each family and each kind of gradient, for a slow backend."""
    qkv = draw((2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3))
    options: dict[str, Any] = {"attn_mask": torch.arange(35).reshape(5, 7) % 3 > 0, "enable_gqa": True}
    op, reference = (functools.partial(f, **options) for f in (ours.attention, plain_ops.attention))
    compare(op, reference, qkv, backend, absent="2", throughs=(True,))
    grouped = lambda f: lambda x, w, b: f(x, 3, w, b, act="silu")  # noqa: E731
    images = draw((2, 6, 3, 5), (6,), (6,))
    compare(grouped(ours.group_norm), grouped(plain_ops.group_norm), images, backend, throughs=(False,))
    network("transformer", backend)


def transforms(backend: str) -> None:
    """vmap of jvp and jacfwd inside a compiled function."""
    qkv, many = draw(*[(2, 2, 3, 4)] * 3), draw((5, 2, 2, 3, 4), seed=1)[0]

    def mapped(f: Call, way: Callable) -> Callable:
        return lambda many: vmap(lambda t: way(lambda q: f(q, *qkv[1:]), (qkv[0],), (t,))[1])(many)

    def compiled(call: Callable) -> Callable:
        return torch.compile(call, fullgraph=True, backend=backend)

    close(compiled(mapped(ours.attention, jvp))(many), mapped(plain_ops.attention, torch.func.jvp)(many))
    close(compiled(jacfwd(ours.layer_norm))(qkv[0]), jacfwd(plain_ops.layer_norm)(qkv[0]))
    nested = lambda q: torch.func.jvp(lambda x: jvp(ours.layer_norm, (x,), (q,))[1], (q,), (q,))[1]  # noqa: E731
    of_gradient = lambda q: jvp(grad(lambda x: ours.attention(x, x, x).sum()), (q,), (q,))[1]  # noqa: E731
    of_vmap = lambda q: jvp(vmap(ours.layer_norm), (q,), (q,))[1]  # noqa: E731
    refused = {"nested": nested, "gradient": of_gradient, "vmap": of_vmap}
    for name, call in refused.items():
        in_a_fork(functools.partial(is_refused, name, lambda call=call: compiled(call)(qkv[0])))


def is_refused(name: str, call: Callable) -> None:
    """Check that compiling the call raises."""
    try:
        call()
    except Exception:
        return
    raise AssertionError(f"{name} was compiled, expected a refusal")


def in_a_fork(act: Callable[[], None]) -> None:
    """Run in a process of its own: a failed trace leaves forward AD's level entered."""
    if (pid := os.fork()) == 0:
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def dynamic(backend: str) -> None:
    """One graph for several sizes; without Linear layers, whose jvp torch itself compiles for one size only."""

    def block(given: Any) -> Call:
        def run(x: Tensor, t: Tensor) -> Tensor:
            x = given.ada_layer_norm(x, t, t.sin())
            q = given.rms_norm(x.unflatten(-1, (3, -1)).transpose(1, 2))
            return given.attention(q, q.sin(), q.cos(), is_causal=True)

        return run

    every = functools.partial(torch.compile, fullgraph=True, backend=backend, dynamic=True)
    traced = every(lambda x, t: jvp(block(ours), (x, t), (t[:, None] * x, t)))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (4, 7, 9):
            x, t = draw((size - 1, size, 12), (size - 1, 12), seed=size)
            close(traced(x, t), torch.func.jvp(block(plain_ops), (x, t), (t[:, None] * x, t)))
    # A norm as models write it, of heads that are a view.
    rsqrt: Call = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)  # noqa: E731
    heads: Call = lambda x: rsqrt(x.transpose(1, 2)) * x[:, :1].transpose(1, 2).sum(-1, keepdim=True).sin()  # noqa: E731
    traced = every(lambda x, t: jvp(heads, (x,), (t,)))
    for size in (4, 7):
        x, t = draw((size, size, 3, 5), (size, size, 3, 5), seed=size)
        close(traced(x, t), torch.func.jvp(heads, (x,), (t,)))


def switched(backend: str) -> None:
    """One compiled function called with and without a tangent, with both kinds of jvp, and eagerly in between."""
    x, t = draw((3, 8), (3, 8))
    plain = torchs(plain_ops.layer_norm, [x], [t])

    @torch.compile(fullgraph=True, backend=backend)
    def traced(x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        before = ours.layer_norm(x)
        return before, *jvp(ours.layer_norm, (x,), (t,)), *jvp(ours.layer_norm, (x,), (t,), tangent_grad=True)

    for _ in range(2):
        before, *rest = traced(x.requires_grad_(), t)
        close((before, *rest), (plain[0], *plain, *plain))
        assert [y.requires_grad for y in rest] == [True, False, True, True]
        close(jvp(ours.layer_norm, (x,), (t,)), plain)


def counting(found: Counter[str]) -> Callable[..., Any]:
    """Return a compiler that counts the operators of the forward graph, and runs it as it is."""

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.update(str(node.target).split(".")[1] for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=count, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))


def products(backend: str) -> None:
    """Rows that lie apart, multiplied at once by layers prepared or not; any shape; products inside a vmap."""
    for prepared, bias in ((True, False), (False, False), (False, True)):
        torch._dynamo.reset()
        net, found = nn.Linear(4, 6, bias=bias, dtype=torch.float64), Counter[str]()
        if prepared:
            ours.prepare(net)
        (x, t), weight = (a.transpose(1, 2) for a in draw((3, 4, 5), (3, 4, 5))), net.weight
        made = torch.compile(lambda: jvp(net, (x,), (t,)), backend=counting(found), fullgraph=True)()  # noqa: B023
        close(made, (net(x), t @ weight.T))
        assert (found["mm"] + found["addmm"], found["bmm"]) == (2, 0)
        close(torch.autograd.grad(made[0].sin().sum(), weight), torch.autograd.grad(net(x).sin().sum(), weight))
    for shape in ((0, 5, 4), (3, 0, 4), (2, 1, 3, 4), (4,)):
        torch._dynamo.reset()
        net, (x, t) = nn.Linear(4, 6, dtype=torch.float64), draw(shape, shape)
        made = torch.compile(lambda: jvp(net, (x,), (t,)), backend=backend, fullgraph=True)()  # noqa: B023
        close(made, (net(x), t @ net.weight.T))
    (x, t), rows = draw((3, 4, 5), (3, 4, 5)), torch.func.vmap(lambda r: r * r.sin().sum(-1, keepdim=True))
    close(torch.compile(lambda: jvp(rows, (x,), (t,)), backend=backend)(), torch.func.jvp(rows, (x,), (t,)))


ALL = (attention, masks, rules, norms, formats, explicit, networks, checkpointed, representatives, transforms, switched)
FAMILIES = {f.__name__: f for f in (*ALL, dynamic, products, more_rules, more_formats)}


def main(backend: str, *families: str) -> None:
    """Run families; the package's own warnings are errors."""
    warnings.filterwarnings("error", module="fullstride")
    for family in families:
        sys.stderr.write(f"{family} by {backend}\n")
        torch._dynamo.reset()
        FAMILIES[family](backend)


if __name__ == "__main__":
    main(*sys.argv[1:])
