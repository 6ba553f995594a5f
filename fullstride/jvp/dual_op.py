"""Ops on primals and tangents that PyTorch can differentiate, transform, compile and capture.

An op is three functions of plain tensors: forward, backward, and the shapes of what forward returns. Eager calls go
through an `autograd.Function` with a rule for vmap, calls under `torch.compile` through operators of the library
`fullstride`, which the compiler keeps whole. Neither has a `jvp`: PyTorch drops that of a Function when it compiles
(pytorch#192985) and has none for a library's operator. Tangents are ordinary arguments and results instead.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from fullstride.device.launch_replay import Replayed
from fullstride.device.tensor_trees import in_memory
from fullstride.jvp.state import refuse_checkpoint, without_own_modes
from fullstride.jvp.tangent_rules import no_view

Tensors = Sequence[Tensor | None]


def _undisturbed(run: Callable[..., Any]) -> Callable[..., Any]:
    """A method without autocast, which would cast what the op computes in a precision of its own choice, and out of
    sight of modes, which would find no tangent in there and take their time at each call; on the tensors' GPU.
    """

    @wraps(run)
    def called(op: "DualOp", first: Tensor, *args: Any) -> Any:
        device = first.device
        if torch.is_autocast_enabled(device.type):
            torch.set_autocast_enabled(device.type, False)  # its context manager takes the host longer
            try:
                return called(op, first, *args)
            finally:
                torch.set_autocast_enabled(device.type, True)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # kernels are launched on the current one
                return called(op, first, *args)
        with torch._C.DisableTorchFunction():
            return run(op, first, *args)

    return called


@dataclass(frozen=True, eq=False)
class DualOp:
    """An op on primals and tangents.

    Its functions take tuples in the order of the names; `saved` are the outputs of forward, absent if not saved.

    Attributes:
        name: unique name of the operator.
        primals: names of the tensor arguments that are not tangents; all but the first may be absent.
        tangents: names of the tangents; any of them may be absent.
        settings: names and schema types of the other arguments. If the last is "triton", forward and backward take
            fake tensors, too, by which a compiler traces: their kernels are then compiled meanwhile. Their results
            then depend on the settings, on `state` and on the tensors' kinds, and calls are repeated by `Replayed`.
        rows: number of tensors that forward returns after the output and its tangent.
        forward: (primals, tangents, settings) -> output, its tangent or None, and the rows' statistics that backward
            needs.
        backward: (gradient of the output, of its tangent or None, primals, tangents, saved, settings) -> a gradient or
            None for each tensor. If the gradient of the tangent is None, so are all tangents.
        shapes: (primals, tangents, settings) -> empty tensors like those that forward returns.
        keeps_output: whether backward needs the output and its tangent, too.
        shared: names of the tensors whose first dimension is no batch. If vmap maps none of them, it is folded into
            the others' batch; else the op runs once for each.
        gradient_like: (first tensor, a tensor) -> that one's gradient, empty, as it lies in memory.
        seldom: a primal whose gradient backward leaves out, and a function of the same arguments that returns it; it is
            called only if that gradient is needed.
        state: function that returns what else than their arguments forward and backward with kernels depend on.

    """

    name: str
    primals: tuple[str, ...]
    tangents: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    rows: int
    forward: Callable[[Tensors, Tensors, Sequence[Any]], Tensors]
    backward: Callable[..., Tensors]
    shapes: Callable[[Tensors, Tensors, Sequence[Any]], Tensors]
    keeps_output: bool
    shared: tuple[str, ...]
    gradient_like: Callable[[Tensor, Tensor], Tensor] = lambda first, of: torch.empty_like(of)
    seldom: tuple[str, Callable[..., Tensor]] | None = None
    state: Callable[[], Hashable] = lambda: None

    def __call__(self, primals: Tensors, tangents: Tensors, settings: Sequence[Any], tangent_grad: bool):
        """The output, and its tangent or None if no tangent is given."""
        if torch.compiler.is_compiling():
            operator = getattr(torch.ops.fullstride, self.name)
            output, tangent = operator(*primals, *tangents, *settings, tangent_grad)[:2]
        else:
            refuse_checkpoint()
            with without_own_modes():
                given = *primals, *tangents
                output, tangent = self.forward_function.apply(self, tuple(settings), tangent_grad, *given)[:2]
        if all(t is None for t in tangents):
            return output, None
        return output, tangent if tangent_grad else tangent.detach()

    @cached_property
    def forward_function(self) -> type["Forward"]:
        """`Forward` under the op's name, by which a profile knows what it does."""
        return type(self.name, (Forward,), {})

    @cached_property
    def backward_function(self) -> type["Backward"]:
        """`Backward` under the name of the op's second operator."""
        return type(f"{self.name}_backward", (Backward,), {})

    def needs_seldom(self, needed: Sequence[bool]) -> bool:
        """Return whether the gradient of `seldom` is needed, given which of the tensors need theirs.

        Autograd knows that in the backward pass; `requires_grad` is False on functorch's wrappers of what needs it.
        """
        return self.seldom is not None and needed[self.primals.index(self.seldom[0])]

    def split(self, args: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        """Primals, tangents, saved outputs, which forward has none of, and settings of an operator's arguments."""
        saved = len(args) - len(self.settings)
        first, second = len(self.primals), len(self.primals) + len(self.tangents)
        return args[:first], args[first:second], args[second:saved], args[saved:]

    @_undisturbed
    def run(self, *args: Any) -> Tensors:
        """Compute what forward returns, from the operator's arguments."""
        return self._replayed_forward(*args, state=self.state()) if args[-1] == "triton" else self._forward(*args)

    @cached_property
    def _replayed_forward(self) -> Replayed:
        return Replayed(self._forward)

    @cached_property
    def _replayed_backward(self) -> Replayed:
        return Replayed(self._gradients)

    def _forward(self, *args: Any) -> Tensors:
        primals, tangents, _, settings = self.split([*map(in_memory, args)])
        return self.forward(primals, tangents, settings)

    def empty(self, *args: Any) -> Tensors:
        """Make what forward returns, empty, from the operator's arguments."""
        primals, tangents, _, settings = self.split(args)
        return self.shapes(primals, tangents, settings)

    @_undisturbed
    def gradients(self, gradient: Tensor, of_tangent: Tensor | None, *args: Any) -> Tensors:
        """Compute a gradient or None for each tensor; the last argument is whether `seldom`'s is needed."""
        if args[-2] != "triton":
            return self._gradients(gradient, of_tangent, *args)
        return self._replayed_backward(gradient, of_tangent, *args, state=self.state())

    def _gradients(self, *args: Any) -> Tensors:
        args = tuple(map(in_memory, args))
        given = *args[:2], *self.split(args[2:-1])
        found = list(self.backward(*given))
        if self.seldom is not None and args[-1]:
            name, compute = self.seldom
            found[self.primals.index(name)] = compute(*given)
        return found

    def kept(self, tensors: Tensors, outputs: Tensors, tangent_grad: bool) -> list[Tensor | None]:
        """Select the tensors saved for backward; without a gradient of the tangent, none of the tangents."""
        primals, tangents = tensors[: len(self.primals)], tensors[len(self.primals) :]
        output, tangent, *rows = outputs
        full = tangent_grad and any(t is not None for t in tangents)
        first = [output, tangent if full else None] if self.keeps_output else [None, None]
        return [*primals, *(tangents if full else [None] * len(tangents)), *first, *rows]


class _Function(torch.autograd.Function):
    """A function whose `apply` looks for transforms of torch.func first: PyTorch's inspects the signature before it."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply the function, as `torch.autograd.Function` does."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        by_c: Any = super(torch.autograd.Function, cls)
        return by_c.apply(*unwrap_dead_wrappers(args))


class Forward(_Function):
    """An op's forward in eager mode."""

    @staticmethod
    def forward(op: DualOp, settings: tuple, tangent_grad: bool, *tensors: Tensor | None) -> tuple:
        """Run the op's forward pass."""
        # A later in-place activation may not write to a view that a Function returns.
        return tuple([None if x is None else no_view(x) for x in op.run(*tensors, *settings)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        """Save the tensors that backward needs."""
        op, settings, tangent_grad, *tensors = inputs
        ctx.op, ctx.settings = op, settings
        ctx.set_materialize_grads(False)
        fixed = output[2:] if tangent_grad else output[1:]
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        ctx.save_for_backward(*op.kept(tensors, output, tangent_grad))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        """The gradients of all tensors."""
        if forward_ad._current_level >= 0:
            raise RuntimeError(
                f"a backward pass of fullstride's {ctx.op.name} inside a dual level: the gradient's own tangent, which "
                "PyTorch would compute there, is not available; call the backward pass after leaving the level, or "
                "attention with implementation='plain'"
            )
        if gradients[0] is None and gradients[1] is None:
            return (None,) * len(ctx.needs_input_grad)
        needs_seldom = ctx.op.needs_seldom(ctx.needs_input_grad[3:])
        recorded = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        run = ctx.op.backward_function.apply if recorded else Backward.forward
        found = run(ctx.op, ctx.settings, needs_seldom, *gradients[:2], *ctx.saved_tensors)
        return (None, None, None, *found)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        """Run one call for the whole batch, or one call per entry."""
        op, settings, tangent_grad, *tensors = args
        call = lambda *xs: op.forward_function.apply(op, settings, tangent_grad, *xs)  # noqa: E731
        shared = _where_shared(op)
        folds = all(dim is None or not alone for dim, alone in zip(in_dims[3:], shared, strict=True))
        folds = folds and _has_batch(tensors[0], in_dims[3])
        return _mapped(call, info.batch_size, in_dims[3:], tensors, shared, folds)


class Backward(_Function):
    """An op's backward in eager mode, which has no derivative of its own."""

    @staticmethod
    def forward(op: DualOp, settings: tuple, needs_seldom: bool, *tensors: Tensor | None) -> tuple:
        """Run the op's backward pass."""
        gradient, of_tangent, *kept = tensors
        if gradient is None:
            assert of_tangent is not None
            gradient = torch.zeros_like(of_tangent)
        return tuple(op.gradients(gradient, of_tangent, *kept, *settings, needs_seldom))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        """Keep the name for the message."""
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> None:
        """Refuse.

        Raises:
            RuntimeError: always.

        """
        raise second_derivative(ctx.name)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        """Run one call for the whole batch, or one call per entry."""
        op, settings, needs_seldom, *tensors = args
        call = lambda *xs: op.backward_function.apply(op, settings, needs_seldom, *xs)  # noqa: E731
        shared = [False, False, *_where_shared(op), *[False] * (2 + op.rows)]
        # The gradient of a shared tensor sums over the batch, which must not be several.
        folds = all(x is None or not alone for x, alone in zip(tensors, shared, strict=True))
        folds = folds and _has_batch(tensors[2], in_dims[5])
        return _mapped(call, info.batch_size, in_dims[3:], tensors, shared, folds)


def second_derivative(name: str) -> RuntimeError:
    """Return the error for a derivative of an op's backward pass."""
    return RuntimeError(
        f"a second derivative by backward passes through fullstride's {name}, which has only a first one; use PyTorch "
        "operations (torch.nn.functional) in a model that is differentiated twice, or attention with "
        "implementation='plain', which has derivatives of any order"
    )


def _has_batch(x: Tensor | None, dim: int | None) -> bool:
    """Return whether the first primal has a dimension to fold into: a single row has none."""
    return x is not None and x.ndim - (dim is not None) > 1


def _where_shared(op: DualOp) -> list[bool]:
    return [name in op.shared for name in (*op.primals, *op.tangents)]


def _mapped(call: Callable[..., tuple], size: int, dims: tuple, tensors: Tensors, shared: list[bool], folds: bool):
    if folds:
        given = zip(tensors, dims, shared, strict=True)
        outs = call(*(x if alone else _folded(x, dim, size) for x, dim, alone in given))
        outs = tuple(None if x is None else x.unflatten(0, (size, -1)) for x in outs)
    else:
        each = [call(*(_one(x, dim, i) for x, dim in zip(tensors, dims, strict=True))) for i in range(size)]
        outs = tuple(None if xs[0] is None else torch.stack(xs) for xs in zip(*each, strict=True))
    return outs, tuple(None if x is None else 0 for x in outs)


def _folded(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if x is None:
        return None
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _one(x: Tensor | None, dim: int | None, i: int) -> Tensor | None:
    return x if x is None or dim is None else x.select(dim, i)
