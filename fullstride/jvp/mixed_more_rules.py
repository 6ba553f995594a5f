"""More rules for batches in which only the first samples carry a tangent, by torch's own derivatives.

What acts on each sample alone runs once on all primals, and once, under `torch.func.jvp`, on those with a tangent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp.mixed_batch import REMEDY, RULES, MixedBatch, rule
from fullstride.jvp.mixed_rules import _beside, _head, _primal, _reversed

POINTWISE = (
    "abs", "addcdiv", "addcmul", "asinh", "atan", "atan2", "celu", "clamp", "clamp_max", "clamp_min", "clip", "cosh",
    "elu", "erf", "exp", "exp2", "expm1", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "hypot", "leaky_relu",
    "lerp", "log", "log10", "log1p", "log2", "logaddexp", "logsigmoid", "maximum", "minimum", "mish", "pow",
    "reciprocal", "relu", "relu6", "rsqrt", "selu", "sigmoid", "sinc", "sinh", "softplus", "softshrink", "softsign",
    "sqrt", "square", "tan", "tanh", "tanhshrink", "threshold", "where",
)  # fmt: skip
ALONG = (
    "amax",
    "amin",
    "cumsum",
    "glu",
    "log_softmax",
    "logsumexp",
    "mean",
    "prod",
    "softmax",
    "softmin",
    "std",
    "sum",
    "var",
)
# Number of dimensions of (batch, channels, ...); with one less, some functions take the first one for channels.
SPATIAL = {
    **{f"{name}{d}d": d + 2 for d in (1, 2, 3) for name in ("avg_pool", "adaptive_avg_pool", "max_pool")},
    **{f"conv_transpose{d}d": d + 2 for d in (1, 2, 3)},
    "conv1d": 3, "conv3d": 5, "interpolate": 3, "pad": 3, "pixel_shuffle": 4, "pixel_unshuffle": 4,
}  # fmt: skip
COMPARED = ("eq", "ge", "gt", "le", "lt", "ne")


def _plain(name: str) -> Callable[..., Any]:
    return getattr(torch, name, None) or getattr(F, name)


def _refuse(reason: str) -> ValueError:
    return ValueError(f"{reason} of a batch in which only some samples carry a tangent; {REMEDY}")


def _moved(f: Callable[..., Tensor], args: Sequence[Any], heads: Sequence[Any]) -> Tensor:
    """Compute the tangent of f at the heads, along the arguments' tangents."""
    at = [i for i, x in enumerate(args) if isinstance(x, MixedBatch)]

    def of_moving(*moving: Tensor) -> Tensor:
        given = list(heads)
        for i, x in zip(at, moving, strict=True):
            given[i] = x
        return f(*given)

    # Clones: under torch.compile a primal must not be a view.
    with torch.no_grad():
        return torch.func.jvp(of_moving, tuple(heads[i].clone() for i in at), tuple(args[i].tangent for i in at))[1]


def _pointwise(name: str) -> Callable[..., MixedBatch]:
    f = _plain(name)

    def run(*args: Any, **named: Any) -> MixedBatch:
        named.pop("inplace", None)
        args, named = (*args, *named.values()), dict.fromkeys(named)
        fixed = len(args) - len(named)
        call = lambda *xs: f(*xs[:fixed], **dict(zip(named, xs[fixed:], strict=True)))  # noqa: E731
        primal = call(*map(_primal, args))
        n = next(len(x.tangent) for x in args if isinstance(x, MixedBatch))
        tangent = _moved(call, args, [_head(x, n, primal) for x in args])
        return _beside(primal, tangent, *args)

    return run


def _dims(x: MixedBatch, dim: Any, name: str) -> None:
    """Return the dimensions; raise if one is the samples'."""
    x.check_front()
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    if not dims or any(type(d) is not int or d % x.primal.ndim == 0 for d in dims):
        raise _refuse(f"{name} along dim={dim}")


def _along(name: str) -> Callable[..., MixedBatch]:
    f = _plain(name)

    def run(input: MixedBatch, dim: Any = -1 if name == "glu" else None, *more: Any, **named: Any) -> MixedBatch:  # noqa: A002
        dim = named.pop("axis", dim)
        named.pop("_stacklevel", None)
        _dims(input, dim, name)
        call = lambda x: f(x, dim, *more, **named)  # noqa: E731
        return MixedBatch(call(input.primal), _moved(call, [input], [input.head]))

    return run


def _spatial(name: str, ndim: int) -> Callable[..., MixedBatch]:
    f = _plain(name)

    def run(input: Any, *args: Any, **named: Any) -> MixedBatch:  # noqa: A002
        if any(isinstance(x, MixedBatch) for x in (*args, *named.values())) or not isinstance(input, MixedBatch):
            raise _refuse(f"{name} by weights that carry a tangent")
        if named.pop("return_indices", False):
            raise _refuse(f"{name} with indices")
        input.check_front()
        pads = (args[0] if args else named["pad"]) if name == "pad" else ()
        if input.primal.ndim < ndim or len(pads) > 2 * (input.primal.ndim - 1):
            raise _refuse(f"{name} of {tuple(input.primal.shape)}, which has no dimension for the samples,")
        call = lambda x: f(x, *args, **named)  # noqa: E731
        return MixedBatch(call(input.primal), _moved(call, [input], [input.head]))

    return run


def _rows(x: MixedBatch, sizes: Sequence[int]) -> tuple[int, ...]:
    """The tangent's sizes for sizes of the primal: of the first dimension the same share."""
    rows, left = divmod(sizes[0] * len(x.tangent), len(x.primal))
    if left:
        raise _refuse(f"a shape {tuple(sizes)} whose rows hold samples with and without a tangent,")
    return (rows, *sizes[1:])


@rule("reshape", "view")
def reshape(input: MixedBatch, *shape: Any) -> MixedBatch:  # noqa: A002
    """Reshape into rows in which all samples carry a tangent, or none."""
    input.check_front()
    sizes = shape[0] if isinstance(shape[0], (tuple, list, torch.Size)) else shape
    primal = input.primal.reshape(tuple(sizes))
    if not primal.ndim:
        raise _refuse("a shape ()")
    with torch.no_grad():
        return MixedBatch(primal, input.tangent.reshape(_rows(input, primal.shape)))


@rule("expand")
def expand(input: MixedBatch, *shape: Any) -> MixedBatch:  # noqa: A002
    """Apply to any dimension but the samples'."""
    input.check_front()
    sizes = tuple(shape[0] if isinstance(shape[0], (tuple, list, torch.Size)) else shape)
    if len(sizes) != input.primal.ndim or sizes[0] not in (-1, len(input.primal)):
        raise _refuse(f"an expansion to {sizes}")
    return MixedBatch(input.primal.expand(sizes), input.tangent.expand(-1, *sizes[1:]))


@rule("squeeze")
def squeeze(input: MixedBatch, dim: Any = None) -> MixedBatch:  # noqa: A002
    """Apply to named dimensions but the samples'."""
    _dims(input, dim, "squeeze")
    return MixedBatch(input.primal.squeeze(dim), input.tangent.squeeze(dim))


@rule("stack")
def stack(tensors: Sequence[Any], dim: int = 0) -> MixedBatch:
    """Stack along a new dimension after the samples'."""
    some = next(x for x in tensors if isinstance(x, MixedBatch))
    some.check_front()
    if dim % (some.primal.ndim + 1) == 0:
        raise _refuse("a stack in front of the samples")
    n = len(some.tangent)
    with torch.no_grad():
        moved = [x.tangent if isinstance(x, MixedBatch) else torch.zeros_like(x[:n]) for x in tensors]
        tangent = torch.stack(moved, dim)
    return MixedBatch(torch.stack([_primal(x) for x in tensors], dim), tangent)


@rule("split")
def split(tensor: MixedBatch, split_size_or_sections: Any, dim: int = 0) -> tuple[MixedBatch, ...]:
    """Split along any dimension but the samples'."""
    _dims(tensor, dim, "split")
    parts = (x.split(split_size_or_sections, dim) for x in (tensor.primal, tensor.tangent))
    return tuple(MixedBatch(*pair) for pair in zip(*parts, strict=True))


@rule("matmul", "bmm", "__matmul__")
def matmul(input: Any, other: Any) -> MixedBatch:  # noqa: A002
    """Rows of samples by a matrix, or a product for each sample."""
    if torch.compiler.is_compiling() and not isinstance(input, MixedBatch):
        input, other = _in_order(input, other)  # noqa: A001
    primal = torch.matmul(_primal(input), _primal(other))
    moving = [x for x in (input, other) if isinstance(x, MixedBatch)]
    rows = (
        isinstance(input, MixedBatch)
        and input.primal.ndim == 2
        and not isinstance(other, MixedBatch)
        and other.ndim <= 2
    )
    each = all(x.primal.ndim == primal.ndim > 2 for x in moving)
    if not rows and not each:
        raise _refuse("a matrix product over the samples")
    for x in moving:
        x.check_front()
    n = len(moving[0].tangent)
    heads = [x if rows and not isinstance(x, MixedBatch) else _head(x, n, primal) for x in (input, other)]
    return _beside(primal, _moved(torch.matmul, [input, other], heads), *([] if rows else moving))


def _in_order(tensor: Tensor, batch: MixedBatch) -> tuple[Any, Any]:
    """Order a tensor and a batch, which the compiler gives in this order for `batch @ tensor`, too."""
    if not _chains(batch.primal, tensor):
        return tensor, batch
    if not _chains(tensor, batch.primal):
        return batch, tensor
    from fullstride.jvp.mixed_compiled import refuse_operator  # the compiler is a long import

    refuse_operator()
    return tensor, batch


def _chains(first: Tensor, second: Tensor) -> bool:
    return first.shape[-1] == second.shape[max(-2, -second.ndim)]


@rule("einsum")
def einsum(equation: str, *operands: Any) -> MixedBatch:
    """Apply if the samples' letter comes first in the output and in every operand with a tangent."""
    given = operands[0] if isinstance(operands[0], (tuple, list)) else operands
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    own = {term[:1] for term, x in zip(terms, given, strict=True) if isinstance(x, MixedBatch)}
    letter = own.pop() if len(own) == 1 else ""
    inside = any(letter in term[1:] for term in [*terms, output])
    if not arrow or not letter.isalpha() or not output.startswith(letter) or inside:
        raise _refuse(f"einsum {equation!r}, which does not keep the samples in front,")
    n = next(len(x.tangent) for x in given if isinstance(x, MixedBatch))
    heads = [
        x.head if isinstance(x, MixedBatch) else x[:n] if t[0] == letter else x
        for t, x in zip(terms, given, strict=True)
    ]
    call = lambda *xs: torch.einsum(equation, *xs)  # noqa: E731
    return MixedBatch(call(*map(_primal, given)), _moved(call, given, heads))


def _compared(name: str) -> Callable[..., Tensor]:
    return lambda a, b: getattr(torch, name)(_primal(a), _primal(b))


def _in_place(name: str, f: Callable[..., MixedBatch]) -> Callable[..., MixedBatch]:
    """Change the primal in place as torch does, views included, and its tangent in the same way."""

    def run(self: MixedBatch, *args: Any, **named: Any) -> MixedBatch:
        if torch.compiler.is_compiling():
            raise _refuse(f"a compiled {name}, which the compiler may reorder,")
        if self.primal.requires_grad and self.primal.is_leaf:
            raise _refuse(f"{name} of an input")
        with torch.no_grad():
            still = MixedBatch(self.primal.detach().clone(), self.tangent.clone())
            # The unwrapped rule has no check for lost gradients.
            tangent = getattr(f, "__wrapped__", f)(still, *args, **named).tangent
        getattr(self.primal, name)(*map(_primal, args), **named)
        with torch.no_grad():
            self.tangent.copy_(tangent)
        return self

    return run


def _register() -> None:
    made = {name: _pointwise(name) for name in POINTWISE} | {name: _along(name) for name in ALONG}
    made |= {name: _spatial(name, ndim) for name, ndim in SPATIAL.items()}
    for name, f in made.items():
        names = [name, *(["__pow__"] if name == "pow" else []), *(["_" + name] if name.startswith("max_pool") else [])]
        rule(*names)(f)
        if hasattr(Tensor, name):
            setattr(MixedBatch, name, RULES[name])
    for name in ("reshape", "view", "expand", "squeeze", "split", "matmul", "bmm"):
        setattr(MixedBatch, name, RULES[name])
    rule("__rpow__")(_reversed(RULES["pow"]))
    MixedBatch.__rpow__ = RULES["__rpow__"]  # pyright: ignore[reportAttributeAccessIssue]
    MixedBatch.__pow__, MixedBatch.__matmul__ = RULES["pow"], RULES["matmul"]  # pyright: ignore[reportAttributeAccessIssue]
    MixedBatch.__rmatmul__ = lambda self, other: RULES["matmul"](other, self)  # pyright: ignore[reportAttributeAccessIssue]
    for name in COMPARED:
        RULES[name] = RULES[f"__{name}__"] = _compared(name)
        setattr(MixedBatch, f"__{name}__", _compared(name))
        setattr(MixedBatch, name, _compared(name))
    for name in ("add", "sub", "mul", "div", "relu", "clamp", "tanh", "sigmoid", "exp", "silu"):
        setattr(MixedBatch, name, RULES[name])
        if hasattr(Tensor, name + "_"):
            setattr(MixedBatch, name + "_", _in_place(name + "_", RULES[name]))
    for name, own in {"add": "iadd", "sub": "isub", "mul": "imul", "div": "itruediv"}.items():
        setattr(MixedBatch, f"__{own}__", _in_place(f"{name}_", RULES[name]))
    RULES["log_sigmoid"] = RULES["logsigmoid"]
    MixedBatch.__hash__ = object.__hash__  # a class that defines == has none


_register()
