"""The operators of a dual op, which `torch.compile` keeps whole."""

from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl

from fullstride.device.triton_compile import compile_from_fake_tensors
from fullstride.jvp.dual_op import DualOp, Tensors, second_derivative

LIBRARY = torch.library.Library("fullstride", "FRAGMENT")


def register(op: DualOp) -> DualOp:
    """Make `torch.ops.fullstride.NAME`, whose absent results are empty bools, and `NAME_backward`, which has none."""
    names = [*op.primals, *op.tangents]
    settings = [f"{kind} {name}" for name, kind in op.settings]
    optional = [f"Tensor? {name}" for name in names[1:]]
    count = len(names)

    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _filled(op.run(*args[:-1]), args[0])

    def shapes(*args: Any) -> tuple[Tensor, ...]:
        if args[-2] == "triton":
            compile_from_fake_tensors(op.name, op.run, args[:-1])
        return _filled(op.empty(*args[:-1]), args[0])

    def backward(*args: Any) -> list[Tensor]:
        return [x for x in op.gradients(*args) if x is not None]

    def gradient_shapes(gradient: Tensor, of_tangent: Tensor | None, *args: Any) -> list[Tensor]:
        if args[-2] == "triton":
            compile_from_fake_tensors(f"{op.name}_backward", op.gradients, (gradient, of_tangent, *args[:-1], False))
        return [op.gradient_like(args[0], args[i]) for i in _differentiated(op, args[:count], of_tangent, args[-1])]

    outputs = [f"Tensor? out{i}" for i in range(2 + op.rows)]
    returned = f"({', '.join(['Tensor'] * (2 + op.rows))})"
    _define(op.name, [f"Tensor {names[0]}", *optional, *settings, "bool tangent_grad"], returned, forward, shapes)
    gradients = ["Tensor gradient", "Tensor? of_tangent", f"Tensor {names[0]}", *optional, *outputs, *settings]
    _define(f"{op.name}_backward", [*gradients, "bool needs_seldom"], "Tensor[]", backward, gradient_shapes)
    _differentiate(op.name, forward, _backward(op), _setup_context(op))
    # Without this, PyTorch would take the backward pass's result for a constant.
    _differentiate(f"{op.name}_backward", backward, _refuse(op), None)
    return op


def _differentiate(name: str, run: Any, backward: Any, setup_context: Any) -> None:
    """Register an operator's backward pass, which compiled code, where autograd records nothing, does not ask for.

    There `torch.library.register_autograd` would take the host longer than the op.
    """
    recorded = make_autograd_impl(getattr(torch.ops.fullstride, name).default, Info(backward, setup_context))

    def autograd(keyset: Any, *args: Any) -> Any:
        traced = keyset.has(torch._C.DispatchKey.Python) or torch._C._are_functorch_transforms_active()
        if traced or torch.is_grad_enabled() or args[0].is_meta:
            return recorded(keyset, *args)
        return run(*args)

    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)


def _refuse(op: DualOp) -> Any:
    def refuse(ctx: Any, *gradients: Any) -> Any:
        raise second_derivative(op.name)

    return refuse


def _define(name: str, arguments: list[str], returned: str, run: Any, shapes: Any) -> None:
    """Define an operator; `custom_op`, which would check at each call what holds here, takes the host longer."""
    LIBRARY.define(f"{name}({', '.join(arguments)}) -> {returned}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fullstride::{name}", shapes, lib=LIBRARY)


def _filled(tensors: Tensors, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0, dtype=torch.bool) if x is None else x for x in tensors)


def _present(tensors: Tensors) -> list[Tensor | None]:
    """Undo `_filled`: a bool tensor stands for None, because no op returns bool."""
    return [None if x is None or x.dtype == torch.bool else x for x in tensors]


def _setup_context(op: DualOp) -> Any:
    count = len(op.primals) + len(op.tangents)

    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        tensors, ctx.settings, tangent_grad = inputs[:count], inputs[count:-1], inputs[-1]
        ctx.full = tangent_grad and any(x is not None for x in inputs[len(op.primals) : count])
        ctx.save_for_backward(*op.kept(tensors, _present(output), tangent_grad))

    return setup_context


def _differentiated(op: DualOp, tensors: Tensors, of_tangent: Tensor | None, needs_seldom: bool) -> list[int]:
    """Return which of the tensors have a gradient: without one of the tangent, no tangent has."""
    wanted = tensors if of_tangent is not None else tensors[: len(op.primals)]
    left_out = None if op.seldom is None or needs_seldom else op.primals.index(op.seldom[0])
    return [i for i, x in enumerate(wanted) if x is not None and x.is_floating_point() and i != left_out]


def _backward(op: DualOp) -> Any:
    count = len(op.primals) + len(op.tangents)

    def backward(ctx: Any, gradient: Tensor, of_tangent: Tensor | None, *_: Tensor) -> tuple[Any, ...]:
        operator = getattr(torch.ops.fullstride, f"{op.name}_backward")
        needs_seldom, of_tangent = op.needs_seldom(ctx.needs_input_grad), of_tangent if ctx.full else None
        found = operator(gradient, of_tangent, *ctx.saved_tensors, *ctx.settings, needs_seldom)
        places = _differentiated(op, ctx.saved_tensors[:count], of_tangent, needs_seldom)
        by_place = dict(zip(places, found, strict=True))
        return (*(by_place.get(i) for i in range(count)), *[None] * (len(ctx.settings) + 1))

    return backward
