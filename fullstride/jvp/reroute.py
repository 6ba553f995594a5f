"""Functional calls of attention and norms inside somebody's function, sent to the ops of this package."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.attention.bias import CausalBias

from fullstride.jvp import elementary, functional_norms, losses, products, state
from fullstride.jvp.attention import written_out
from fullstride.jvp.attention.arguments import as_causal
from fullstride.jvp.attention.op import attention
from fullstride.jvp.dual import inside_transform, moves


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if isinstance(attn_mask, CausalBias):
        attn_mask, is_causal = as_causal(attn_mask, query, key, is_causal)
    if dropout_p > 0 or inside_transform():
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        mask, options = attn_mask, {"scale": factor, "causal": is_causal, "dropout": dropout_p}
        return written_out.attention(query, key, value, mask, **options)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    with state.without_own_modes():  # which would see each look at a size
        alike = 1 if enable_gqa else 2
        batches = {x.shape[:alike] for x in (query, key, value)}
        usual = len(batches) == 1 and query.ndim == key.ndim == value.ndim == 4
    if usual:
        return attention(query, key, value, attn_mask=attn_mask, **options)
    own = 3 if enable_gqa else 2  # dimensions in which they may differ
    lead = torch.broadcast_shapes(*(x.shape[:-own] for x in (query, key, value)))
    q, k, v = (x.expand(*lead, *x.shape[-own:]) for x in (query, key, value))
    mask = attn_mask
    if mask is not None and mask.ndim > 3:
        mask = mask.expand(*q.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    batches = (x.flatten(0, -4) if x.ndim > 3 else x[(None,) * (4 - x.ndim)] for x in (q, k, v))
    out = attention(*batches, attn_mask=mask, **options)
    return out.reshape(*q.shape[:-1], v.shape[-1])


def _multi_head(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Compute it in elementary operations, whose derivatives are torch's own, if it returns its weights."""
    given: list[Any] = list(args)
    if len(given) > NEED_WEIGHTS:
        asked, given[NEED_WEIGHTS] = given[NEED_WEIGHTS], True
    else:
        asked, kwargs = kwargs.get("need_weights", True), kwargs | {"need_weights": True}
    out, weights = F.multi_head_attention_forward(*given, **kwargs)
    return out, weights if asked else None


# Position among the arguments of F.multi_head_attention_forward.
NEED_WEIGHTS = 15
ROUTES: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    **functional_norms.ROUTES,
    **elementary.ROUTES,
    **losses.ROUTES,
}
NAMES = frozenset(f.__name__ for f in ROUTES)
GRADIENTS = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
# Torch's gradients through their tangents are wrong: their rules take saved results, such as a factorisation, for
# constants (found by differences of every operation's tangent).
_ATEN = (
    "native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "_fused_rms_norm",
)  # fmt: skip
WRONG_GRADIENTS = frozenset({
    torch.native_layer_norm, torch.native_batch_norm, torch._native_batch_norm_legit,
    torch.det, Tensor.det, torch.logdet, Tensor.logdet, torch.slogdet, Tensor.slogdet, torch.orgqr, Tensor.orgqr,
    torch.linalg.det, torch.linalg.slogdet, torch.linalg.cholesky, torch.linalg.cholesky_ex, torch.linalg.solve,
    torch.linalg.solve_ex, torch.linalg.tensorsolve, torch.linalg.householder_product,
    *(getattr(torch.ops.aten, name) for name in _ATEN), *(getattr(torch.ops.aten, name).default for name in _ATEN),
})  # fmt: skip
BATCH_NORMS = frozenset(f for f in WRONG_GRADIENTS if "batch_norm" in f.__name__)
# Functions without a derivative in PyTorch, which gives their results no tangent, without a word.
_SPECIAL = (
    "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "chebyshev_polynomial_t", "chebyshev_polynomial_u",
    "chebyshev_polynomial_v", "chebyshev_polynomial_w", "hermite_polynomial_h", "hermite_polynomial_he",
    "laguerre_polynomial_l", "legendre_polynomial_p", "modified_bessel_i0", "modified_bessel_i1",
    "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
    "shifted_chebyshev_polynomial_t", "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w", "spherical_bessel_j0",
)  # fmt: skip
UNDERIVED = frozenset(getattr(torch.special, name) for name in _SPECIAL)
SCATTERS = frozenset({torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_})
# What is to be done with a call, where it is not that of PyTorch.
KINDS: dict[Any, str] = {
    **dict.fromkeys(GRADIENTS, "gradient"),
    **dict.fromkeys(WRONG_GRADIENTS, "wrong gradient"),
    **dict.fromkeys(BATCH_NORMS, "batch norm"),
    **dict.fromkeys(UNDERIVED, "underived"),
    **dict.fromkeys(SCATTERS, "scatter"),
    **dict.fromkeys(ROUTES, "route"),
    Tensor.add_: "counter",
}
# Calls of other functions are not checked, since a check of every operation costs host time, or a compiler's.
HANDLED = frozenset(KINDS)
# For these there are rules in eager mode.
COMPILED = {Tensor.unflatten: "unflatten", F.linear: "route", torch.mul: "product", Tensor.mul: "product"}
# A compiler guards on the attribute that it reads, and on each key of a dictionary.
ROUTE_NAMES = {func: f"route_{i}" for i, func in enumerate([*ROUTES, F.linear])}
ROUTES_BY_NAME = SimpleNamespace(
    **{ROUTE_NAMES[f]: route for f, route in (ROUTES | {F.linear: products.linear}).items()}
)


def _kind(func: Any) -> str | None:
    return COMPILED.get(func) or KINDS.get(func)


def _route_name(func: Any) -> str:
    return ROUTE_NAMES[func]


# Constants to a compiler, which would look at each entry of the tables at every call of what it has compiled.
for _constant in (_kind, _route_name):
    _constant._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


class RerouteFunctional(state.OwnMode):
    """Mode that sends functional calls that carry a tangent to the ops of this package."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run one call.

        Raises:
            GradientInside: at a gradient, if what it goes back through may have been computed apart from its tangent.
            ValueError: if gradients of the tangent may be needed and torch's own are wrong.

        """
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return _compiled(func, args, kwargs)
        state.refuse_checkpoint()
        return handled(func, args, kwargs) if func in HANDLED else func(*args, **kwargs)


def _compiled(func: Any, args: tuple, kwargs: dict) -> Any:
    kind = _kind(func)
    if kind is None:
        return func(*args, **kwargs)
    if kind == "unflatten":  # a method in Python that calls super(), which the compiler cannot follow through a mode
        return torch.ops.aten.unflatten.int(*args, **kwargs)
    if kind == "product":
        apart = not kwargs and products.broadcast(*args)
        return products.multiply(*args) if apart else func(*args, **kwargs)
    return _handled(kind, func, args, kwargs)


def handled(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a call of one of the functions `HANDLED`."""
    return _handled(KINDS[func], func, args, kwargs)


def _handled(kind: str, func: Any, args: tuple, kwargs: dict) -> Any:
    if kind == "route":
        if state.gradient_inside() or any(map(moves, (*args, *kwargs.values()))):
            return getattr(ROUTES_BY_NAME, _route_name(func))(*args, **kwargs)
    elif kind == "gradient" and state.computes_apart():
        raise state.GradientInside
    elif kind in ("wrong gradient", "batch norm"):
        if kind == "batch norm":
            statistics = (*args[3:5], *(kwargs.get(name) for name in ("running_mean", "running_var")))
            _refuse_underived(f"{func.__name__} by its running statistics", statistics)
        if state.tangent_grad():
            _refuse_wrong_gradient(func, (*args, *kwargs.values()))
    elif kind == "underived":
        _refuse_underived(func.__name__.removeprefix("special_"), (*args, *kwargs.values()))
    elif kind == "scatter" and "prod" in (*args[4:5], kwargs.get("reduce")):
        _refuse_underived("scatter_reduce with 'prod'", (*args, *kwargs.values()))
    elif kind == "counter" and _counts(*args):
        with torch._C._DisableFuncTorch():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _counts(*given: Any) -> bool:
    """Return whether a counter (a batch norm's, say) is written in place, which torch.func would refuse."""
    if torch.compiler.is_compiling() or given[0].is_floating_point():
        return False
    return not any(isinstance(x, Tensor) and is_functorch_wrapped_tensor(x) for x in given)


def _refuse_wrong_gradient(func: Any, given: tuple[Any, ...]) -> None:
    if any(map(moves, given)):
        raise ValueError(
            f"torch's gradient through the tangent of {func.__name__} is wrong, and gradients of tangents may be "
            "needed here; expected jvp without tangent_grad, a norm of torch.nn.functional, or elementary operations "
            "(torch.linalg.inv has a right one)"
        )


def _refuse_underived(name: str, given: tuple[Any, ...]) -> None:
    if any(map(moves, given)):
        raise ValueError(
            f"PyTorch has no right forward derivative of {name}, expected arguments without a tangent, or elementary "
            "operations in its place"
        )


@contextmanager
def reroute_functional(mode: Callable[[], state.OwnMode] = RerouteFunctional) -> Iterator[None]:
    """Route the calls made inside; `RerouteFunctional` itself is not entered where calls are routed already."""
    with state.routing() as entered:
        if not entered and mode is RerouteFunctional:
            yield
            return
        with mode():
            yield
