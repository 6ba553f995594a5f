"""`jvp`: the forward derivative of any function, by default without a graph of the tangent."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_interpreter_stack
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from fullstride.jvp.dual import check_pair, is_expanded, outermost_level, unpack
from fullstride.jvp.function_modes import ExplicitZeros, RoutedDetachedTangents
from fullstride.jvp.reroute import RerouteFunctional, reroute_functional
from fullstride.jvp.state import GradientInside, OwnMode, computes_apart, computing, tangent_grad

REMEDIES = {  # by a part of torch's message
    "Nested forward mode AD": (
        "jvp inside another jvp or dual level: fullstride.jvp has only a first forward derivative; expected a single "
        "jvp. For higher orders call torch.func.jvp throughout, on a model of PyTorch operations (torch.nn.functional) "
        "or of attention with implementation='plain'"
    ),
    "forward AD with _scaled_dot_product": (
        "fn calls torch's fused attention, which has no forward derivative, where jvp cannot replace it (through "
        "torch.ops or with torch functions disabled); call fullstride.jvp.attention there"
    ),
    "must implement the jvp function for custom autograd.Function": (
        "fn calls an autograd.Function without a jvp, or a compiled function; compile the function that calls jvp "
        "instead, checkpoint with fullstride.jvp.checkpoint, or write the function in PyTorch operations. A module's "
        "full backward hook is such a function, too: remove it, or hook its output tensors"
    ),
    "must override the setup_context": (
        "fn calls an autograd.Function that torch.func cannot transform, such as torch.utils.checkpoint with "
        "use_reentrant=True; call jvp without tangent_grad, or write the function in PyTorch operations"
    ),
    "with mkldnn_rnn_layer": (
        "fn calls oneDNN's LSTM, which has no forward derivative; call jvp inside "
        "`with torch.backends.mkldnn.flags(enabled=False)`"
    ),
    "with _cudnn_rnn": (
        "fn calls cuDNN's recurrent layer, which has no forward derivative; call jvp inside "
        "`with torch.backends.cudnn.flags(enabled=False)`"
    ),
}
REMEDIES |= dict.fromkeys(
    ("would mutate a captured Tensor", "Cannot access data pointer of Tensor that doesn't have storage"),
    "fn writes to a tensor from outside of it, or passes raw memory on (DistributedDataParallel does both), which "
    "tangent_grad=True cannot follow; call jvp without tangent_grad, or inside the wrapped module: "
    "DistributedDataParallel of a module whose forward calls jvp(net, ...)",
)
REMEDIES["_has_same_storage_numel"] = (
    "a primal is a DTensor, which has no tangent in PyTorch; expected a torch.Tensor: its to_local() or full_tensor()"
)
REMEDIES["Multiple dispatch failed"] = (
    "fn passes a tensor subclass without a forward derivative (MaskedTensor, NestedTensor, ...) to an op, expected "
    "torch.Tensor; convert it first (MaskedTensor.to_tensor(), NestedTensor.values())"
)
REMEDIES |= dict.fromkeys(
    ("_transformer_encoder_layer_fwd", "_nested_tensor_from_mask"),
    "torch's nn.TransformerEncoder takes a path in eval mode that has no forward derivative; switch it off with "
    "torch.backends.mha.set_fastpath_enabled(False)",
)


def jvp(
    fn: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    tangent_grad: bool = False,
    has_aux: bool = False,
) -> tuple[Any, ...]:
    """Compute fn(*primals) and its derivative along the tangents, J_fn(primals) @ tangents, in one pass.

    Like `torch.func.jvp`, which it calls while compiling and inside other transforms, but by default without a graph of
    the tangent (pytorch#151782): nothing is saved for a backward pass through it, and every op of this package saves
    only what the primal's backward pass needs. Call the backward pass after `jvp` has returned.

    Functional attention and norms that fn calls, wherever it finds them, run as the ops of this package. An fn that
    takes a gradient itself is called once more, with these written out in elementary operations.

    Args:
        fn: a function of tensors, or of pytrees of them, such as a module.
        primals: arguments of fn.
        tangents: one tangent for each, of the same structure, shape, dtype and device; None for a constant leaf.
        tangent_grad: whether gradients may be taken through the tangent.
        has_aux: whether fn returns (output, aux) with an aux that is not differentiated.

    Returns:
        The output, its tangent (zeros if it does not depend on the inputs that have one), and aux if `has_aux`.

    Raises:
        ValueError: if primals and tangents do not fit each other.
        RuntimeError: around another jvp of this package's ops, or around a gradient of them.

    """
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():  # which has no dual tensors
        with torch.inference_mode(False), torch.no_grad():
            return jvp(fn, primals, tangents, tangent_grad=tangent_grad, has_aux=has_aux)
    leaves, spec, moves = _checked(primals, tangents)

    def called(*moved: Tensor) -> Any:
        given = iter(moved)
        args = [leaf if move is None else next(given) for leaf, move in zip(leaves, moves, strict=True)]
        with reroute_functional(_mode()):
            return fn(*pytree.tree_unflatten(args, spec))

    still = [leaf for leaf, move in zip(leaves, moves, strict=True) if move is not None]
    # Cloned, as an in-place operation of fn on its argument would write into the caller's tangent.
    moving = [(move if tangent_grad else move.detach()).clone() for move in moves if move is not None]
    if torch.compiler.is_compiling():
        with computing(tangent_grad, inside=False):
            primal, tangent, aux = _functorch(called, still, moving, has_aux)
    else:
        primal, tangent, aux = _eagerly(called, still, moving, has_aux, tangent_grad)
    if not tangent_grad:
        tangent = pytree.tree_map(torch.detach, tangent)
    return (primal, tangent, aux) if has_aux else (primal, tangent)


def _mode() -> Callable[[], OwnMode]:
    if torch.compiler.is_compiling() or get_interpreter_stack():
        return RerouteFunctional
    return ExplicitZeros if tangent_grad() else partial(RoutedDetachedTangents, apart=computes_apart())


def _eagerly(
    fn: Callable[..., Any], primals: list[Tensor], tangents: list[Tensor], has_aux: bool, tangent_grad: bool
) -> tuple[Any, ...]:
    """Call fn, and once more with every operation whole if it turns out to take a gradient itself."""
    outermost = not get_interpreter_stack()  # otherwise a mode cannot reach the duals: torch.func wraps them
    # With a graph of the tangent it is torch.func, too: some of torch's derivatives write in place otherwise.
    by = _dual_level if outermost and not tangent_grad else _functorch
    with _explained():
        try:
            with computing(tangent_grad, inside=False):
                return by(fn, primals, tangents, has_aux)
        except GradientInside:
            by = _dual_level if outermost else _functorch  # torch.func hides the tensors that a gradient goes back to
            with computing(tangent_grad, inside=True):
                return by(fn, primals, tangents, has_aux)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError) as error:
        remedy = next((remedy for said, remedy in REMEDIES.items() if said in str(error)), None)
        if remedy is None:
            raise
        raise RuntimeError(remedy) from error


def _functorch(fn: Callable[..., Any], primals: list[Tensor], tangents: list[Tensor], has_aux: bool) -> tuple:
    # A view as primal fails an internal assertion of the compiler.
    primals = [p.clone() if torch.compiler.is_compiling() else _normal(p) for p in primals]
    if not has_aux:
        return *torch.func.jvp(fn, tuple(primals), tuple(tangents)), None
    rest: list[Any] = []

    def of_tensors(*moved: Tensor) -> Any:  # torch.func.jvp accepts only tensors as aux
        out, aux = fn(*moved)
        leaves, spec = pytree.tree_flatten(aux)
        rest[:] = [leaves, spec]
        return out, [x for x in leaves if isinstance(x, Tensor)]

    *pair, tensors = torch.func.jvp(of_tensors, tuple(primals), tuple(tangents), has_aux=True)
    leaves, spec = rest
    given = iter(tensors)
    aux = pytree.tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], spec)
    return *pair, aux


def _dual_level(fn: Callable[..., Any], primals: list[Tensor], tangents: list[Tensor], has_aux: bool) -> tuple:
    with outermost_level(), _sharded():
        duals = [forward_ad.make_dual(_normal(p), t) for p, t in zip(primals, tangents, strict=True)]
        out = fn(*duals)
        out, aux = out if has_aux else (out, None)
        leaves, spec = pytree.tree_flatten(out)
        pairs = [unpack(x) for x in _tensors(leaves)]
        primal = [pair.primal for pair in pairs]
        tangent = [torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent for pair in pairs]
        aux = pytree.tree_map_only(Tensor, lambda x: unpack(x).primal, aux)
    return pytree.tree_unflatten(primal, spec), pytree.tree_unflatten(tangent, spec), aux


def _normal(primal: Tensor) -> Tensor:
    """A tensor that was made in inference mode, or expanded, takes no tangent; its clone does."""
    return primal.clone() if primal.is_inference() or is_expanded(primal) else primal


def _tensors(leaves: Iterable[Any]) -> Iterator[Tensor]:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"fn returned a {type(leaf).__name__}, expected tensors; return values that are not differentiated "
                "as aux, with has_aux=True"
            )
        yield leaf


def _checked(primals: Any, tangents: Any) -> tuple[list[Any], pytree.TreeSpec, list[Tensor | None]]:
    if not isinstance(primals, tuple) or not isinstance(tangents, tuple):
        kinds = f"{type(primals).__name__} and {type(tangents).__name__}"
        raise ValueError(f"primals and tangents are {kinds}, expected two tuples, one entry for each argument of fn")
    leaves, spec = pytree.tree_flatten(primals)
    moves, other = pytree.tree_flatten(tangents)
    if spec != other:
        raise ValueError(f"tangents have the structure {other}, expected that of the primals, {spec}")
    for leaf, move in zip(leaves, moves, strict=True):
        check_pair(leaf, move)
    if all(move is None for move in moves):
        raise ValueError("every tangent is None, expected at least one tensor; without a tangent call fn itself")
    return leaves, spec, moves


def _as_views(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return tangents as views, as a dual level expects for inputs that a Function returns; torch's own does not."""
    return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


@contextmanager
def _sharded() -> Iterator[None]:
    """Let the function that `fully_shard` calls on a module's inputs pass their tangents on."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    if fsdp is None:
        yield
        return
    function = fsdp.RegisterPostBackwardFunction
    before = function.__dict__.get("jvp")
    function.jvp = staticmethod(_as_views)
    try:
        yield
    finally:
        if before is None:
            del function.jvp
        else:
            function.jvp = before
