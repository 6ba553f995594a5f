"""Batches in which only the first samples carry a tangent: one pass over all primals, and tangents for some.

A `MixedBatch` is a tensor of B samples and the tangent of its first n. A network's operations run once on the B
primals, as it would without any derivative, autograd included, and once on the n tangents, without a graph: nothing of
them is kept, and the backward pass is that of the primals alone. Torch's functions find their rules in `RULES` by
`__torch_function__`, which the compiler follows, too; one without a rule raises.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

REMEDY = "use loss.split=static (every sample of a pass then carries a tangent), or rewrite it with other operations"
# For the type checker a MixedBatch is a Tensor.
_Like = Tensor if TYPE_CHECKING else object


class MixedBatch(_Like):
    """B samples, and the tangent of the first n of them: of primal[:n]'s shape, format and device, without a graph."""

    primal: Tensor
    tangent: Tensor
    recorded: bool  # whether autograd saw how it was made

    def __init__(self, primal: Tensor, tangent: Tensor):
        """Take both; the batch is the first dimension of each."""
        self.primal, self.tangent, self.recorded = primal, tangent, torch.is_grad_enabled()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch by its rule.

        Raises:
            ValueError: for one that has none, and for a compiled operator that writes in place.

        """
        name = func.__name__
        if name not in RULES:
            raise ValueError(
                f"torch's {name} has no rule for a batch in which only some samples carry a tangent; {REMEDY}"
            )
        if torch.compiler.is_compiling() and name in OPERATORS and not isinstance(args[0], MixedBatch):
            from fullstride.jvp.mixed_compiled import refuse_in_place  # the compiler is a long import

            refuse_in_place()
        return RULES[name](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> NoReturn:
        """Raise for an attribute that a tensor has and a `MixedBatch` lacks."""
        raise AttributeError(f"{name} has no rule for a batch in which only some samples carry a tangent; {REMEDY}")

    @property
    def head(self) -> Tensor:
        """The primals of the samples that carry a tangent.

        Raises:
            ValueError: if the batch is not the first dimension any more.

        """
        self.check_front()
        return self.primal[: len(self.tangent)]

    def check_front(self) -> None:
        """Raise unless the batch is the first dimension still."""
        if self.primal.shape[1:] != self.tangent.shape[1:]:
            shapes = f"{tuple(self.primal.shape)} and {tuple(self.tangent.shape)}"
            raise ValueError(f"a batch and its tangent are {shapes}, expected the samples in front; {REMEDY}")

    @property
    def samples(self) -> int | None:
        """The dimension of the samples, in which primal and tangent differ in size; None if all carry a tangent."""
        sizes = zip(self.primal.shape, self.tangent.shape, strict=True)
        return next((i for i, (all_of_them, some) in enumerate(sizes) if all_of_them != some), None)

    def along(self, f: Callable[[Tensor], Tensor]) -> "MixedBatch":
        """f(self) of an f that is linear: f of the primal, and f of the tangent."""
        refuse_lost_gradient(self)
        primal = f(self.primal)
        with torch.no_grad():
            tangent = f(self.tangent)
        return MixedBatch(primal, tangent)


Batch = Tensor | MixedBatch
Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}  # by the names of torch's functions, as not all of them are keys to the compiler
# What the compiler makes of `batch += tensor` and the like.
OPERATORS = frozenset({"add", "mul", "matmul", "__rsub__", "__rdiv__", "__rpow__"})


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of the functions of these names."""

    def registered(f: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, watched := _watched(f)))
        return watched

    return registered


def refuse_lost_gradient(*samples: Any) -> None:
    """Raise if autograd stopped recording: the output of an `autograd.Function` would have no graph.

    Raises:
        ValueError: if autograd recorded one of them and does not record now.

    """
    if not torch.is_grad_enabled() and any(isinstance(x, MixedBatch) and x.recorded for x in samples):
        raise ValueError(
            "an autograd.Function, or torch.no_grad, in a pass over a batch in which only some samples carry a "
            f"tangent: its gradient would be lost; {REMEDY}"
        )


def _watched(f: Rule) -> Rule:
    """Return the rule with a check that no gradient is lost."""

    @functools.wraps(f)
    def called(*args: Any, **kwargs: Any) -> Any:
        refuse_lost_gradient(*args)
        recording = torch.is_grad_enabled()
        made = f(*args, **kwargs)
        for x in made if isinstance(made, tuple) else (made,):
            x.recorded = recording
        return made

    return called


def split_mixed(samples: Sequence[Batch | None]) -> tuple[list[Any], list[Any], list[Tensor | None]]:
    """The primals of an op's arguments, those of the samples that carry a tangent, and these tangents.

    Args:
        samples: tensors, at least one a `MixedBatch`; in the others no sample carries a tangent. None stays None.

    Raises:
        ValueError: if a gradient would be lost.

    """
    refuse_lost_gradient(*samples)
    n = next(len(x.tangent) for x in samples if isinstance(x, MixedBatch))
    primals = [x.primal if isinstance(x, MixedBatch) else x for x in samples]
    with torch.no_grad():
        heads = [x.head if isinstance(x, MixedBatch) else x if x is None else x[:n] for x in samples]
    return primals, heads, [x.tangent if isinstance(x, MixedBatch) else None for x in samples]


def _of_primal(name: str) -> property:
    return property(lambda self: getattr(self.primal, name))


def _method_of_primal(name: str) -> Rule:
    return lambda self, *args: getattr(self.primal, name)(*args)


def _on_both(name: str) -> Rule:
    def method(self: MixedBatch, *args: Any, **kwargs: Any) -> MixedBatch:
        return MixedBatch(*(getattr(x, name)(*args, **kwargs) for x in (self.primal, self.tangent)))

    return method


def _item(self: MixedBatch, index: Any) -> MixedBatch:
    first = index[0] if isinstance(index, tuple) else index
    whole = first is Ellipsis or first == slice(None)
    found = MixedBatch(self.primal[index], self.tangent[index]) if whole else None
    if found is None or _counts(found) != _counts(self):
        raise ValueError(f"an index chooses samples of a batch in which only some carry a tangent; {REMEDY}")
    return found


def _counts(x: MixedBatch) -> tuple[int, int] | None:
    """Return the numbers of samples and of those that carry a tangent; None if all do."""
    return None if x.samples is None else (x.primal.shape[x.samples], x.tangent.shape[x.samples])


def _flatten(self: MixedBatch, start_dim: int = 0, end_dim: int = -1) -> MixedBatch:
    start, end, at = start_dim % self.primal.ndim, end_dim % self.primal.ndim, self.samples
    if at is not None and start < at <= end:
        _check_first(self, start, at, "flatten")
    return MixedBatch(*(x.flatten(start_dim, end_dim) for x in (self.primal, self.tangent)))


def _unflatten(self: MixedBatch, dim: int, sizes: Sequence[int]) -> MixedBatch:
    found = MixedBatch(*(x.unflatten(dim, sizes) for x in (self.primal, self.tangent)))
    if self.samples is not None and found.samples is not None and dim % self.primal.ndim == self.samples:
        _check_first(found, self.samples, found.samples, "unflatten")
    return found


def _check_first(x: MixedBatch, start: int, at: int, name: str) -> None:
    """Raise if samples in dimension `at` lie behind others from `start` on: those in front are then not the first."""
    if x.primal.shape[start:at].numel() > 1:
        raise ValueError(
            f"{name} puts {tuple(x.primal.shape[start:at])} in front of the samples, of which only some carry a "
            f"tangent, expected the samples in front; {REMEDY}"
        )


def _unbind(self: MixedBatch, dim: int = 0) -> tuple[MixedBatch, ...]:
    return _pairs(self.primal.unbind(dim), self.tangent.unbind(dim))


def _chunk(self: MixedBatch, chunks: int, dim: int = 0) -> tuple[MixedBatch, ...]:
    if dim % self.primal.ndim in (0, self.samples):
        raise ValueError(f"chunk along the samples of a batch in which only some carry a tangent; {REMEDY}")
    return _pairs(self.primal.chunk(chunks, dim), self.tangent.chunk(chunks, dim))


def _pairs(primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[MixedBatch, ...]:
    if len(primals) != len(tangents):
        raise ValueError(f"iteration over {len(primals)} samples, of which {len(tangents)} carry a tangent; {REMEDY}")
    return tuple(MixedBatch(*pair) for pair in zip(primals, tangents, strict=True))


for _name in ("shape", "ndim", "dtype", "device"):
    setattr(MixedBatch, _name, _of_primal(_name))
# Functions that reorder, copy or round the elements of each sample.
for _name in (
    "bfloat16",
    "contiguous",
    "double",
    "float",
    "half",
    "movedim",
    "permute",
    "swapaxes",
    "to",
    "transpose",
    "unsqueeze",
):
    setattr(MixedBatch, _name, _watched(_on_both(_name)))
for _name in ("dim", "size"):
    setattr(MixedBatch, _name, _method_of_primal(_name))
_methods = {"__getitem__": _item, "unbind": _unbind, "chunk": _chunk, "flatten": _flatten, "unflatten": _unflatten}
for _name, _method in _methods.items():
    setattr(MixedBatch, _name, _watched(_method))
