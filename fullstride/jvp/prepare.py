"""`prepare`: a user's own model with fused forward derivatives."""

import dis
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fullstride.jvp import modules
from fullstride.jvp.reroute import NAMES, ROUTES, reroute_functional

SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    nn.GroupNorm: modules.GroupNorm,
    nn.LayerNorm: modules.LayerNorm,
    nn.RMSNorm: modules.RMSNorm,
    nn.MultiheadAttention: modules.MultiheadAttention,
    nn.Linear: modules.Linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: modules.Linear,
    nn.Conv1d: modules.Conv1d,
    nn.Conv2d: modules.Conv2d,
    nn.Conv3d: modules.Conv3d,
    nn.BatchNorm1d: modules.BatchNorm1d,
    nn.BatchNorm2d: modules.BatchNorm2d,
    nn.BatchNorm3d: modules.BatchNorm3d,
    nn.InstanceNorm1d: modules.InstanceNorm1d,
    nn.InstanceNorm2d: modules.InstanceNorm2d,
    nn.InstanceNorm3d: modules.InstanceNorm3d,
}
# Functions that a module's forward calls, also if a subclass's own forward does.
CALLS: dict[type[nn.Module], str] = {
    nn.GroupNorm: "group_norm",
    nn.LayerNorm: "layer_norm",
    nn.RMSNorm: "rms_norm",
    nn.MultiheadAttention: "multi_head_attention_forward",
}
NORMS = (nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)
MODEL = "(model)"  # the name of the module itself, which has none
UNFUSED = "elementary operations, in several passes over its activations"
WHATEVER = "whatever it and its modules call of attention and norms, wherever they find it"


@dataclass
class Prepared:
    """Report of `prepare`, by the modules' names.

    Attributes:
        swapped: modules that were replaced by this package's, with their original class.
        routed: modules whose functional calls of attention and norms go to this package's ops, with those calls.
        left: norms, attentions and layers that were left unchanged, with the reason.

    """

    swapped: dict[str, str] = field(default_factory=dict)
    routed: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Summary in a sentence, then one line per module."""
        parts = {"swapped": self.swapped, "routed": self.routed, "left": self.left}
        if not any(parts.values()):
            return "Nothing to prepare: no norm, attention, linear layer or convolution that is not prepared already."
        counts = ", ".join(f"{len(found)} {what}" for what, found in parts.items())
        width = max(len(name or MODEL) for found in parts.values() for name in found)
        lines = (
            f"{what:8} {name or MODEL:{width}}  {why}" for what, found in parts.items() for name, why in found.items()
        )
        return "\n".join((f"Modules: {counts}.", "", *lines))


def prepare(model: nn.Module) -> Prepared:
    """Give a model fused forward derivatives, in place; parameters, state_dict keys and hooks stay.

    Norms, `nn.MultiheadAttention`, linear layers and convolutions become subclasses of their own class. `jvp` sends
    functional calls of attention and norms to this package's ops by itself; the model, and each module that is seen to
    make such calls, does so under other transforms, too, and keeps its code. Everything else runs as before, with
    torch's own forward derivatives. Compile the model afterwards, not before.

    Args:
        model: module to prepare; preparing it again changes nothing.

    Returns:
        What was swapped, routed and left, and why.

    Raises:
        ValueError: for a compiled model.

    """
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "the model is compiled, expected the original module; prepare it, then compile the function that calls it"
        )
    done = Prepared()
    for name, module in model.named_modules():
        kind = type(module)
        if kind in SWAPS:
            done.swapped[name] = kind.__name__
            module.__class__ = SWAPS[kind]
        elif not getattr(kind, "_routes", False) and kind not in SWAPS.values():
            calls, reason = _functional_calls(module), _reason_to_leave(module)
            if calls or module is model:
                done.routed[name] = ", ".join(sorted(calls)) or WHATEVER
                module.__class__ = _routing(kind)
            if reason and not calls:
                done.left[name] = reason
    return done


def _reason_to_leave(module: nn.Module) -> str:
    kind = type(module)
    if isinstance(module, NORMS):
        return f"{kind.__name__} has no fused form; {UNFUSED}"
    base = next((base for base in SWAPS if isinstance(module, base)), None)
    if base is None or kind.forward is base.forward:
        return ""
    return f"{kind.__name__} is a subclass of {base.__name__} with a forward of its own; {UNFUSED}"


_ROUTING: dict[type[nn.Module], type[nn.Module]] = {}


def _routing(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass whose forward runs in the mode; one for each class, so that the compiler sees few types."""
    if kind not in _ROUTING:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with reroute_functional():
                return kind.forward(self, *args, **kwargs)

        def reduce(self: Any, _: Any) -> tuple[Any, ...]:
            return _blank, (kind,), self.__getstate__()

        body = {"forward": forward, "__reduce_ex__": reduce, "__module__": kind.__module__, "_routes": True}
        _ROUTING[kind] = type(kind.__name__, (kind,), body)
    return _ROUTING[kind]


def _blank(kind: type[nn.Module]) -> nn.Module:
    """Return an empty module that unpickling fills."""
    return object.__new__(_routing(kind))


def _functional_calls(module: nn.Module) -> set[str]:
    """Names of the functional ops that the module's own code calls, in its methods or the functions that they call."""
    kind = type(module)
    if kind.__module__.startswith("torch.nn."):
        return set()
    own = (base for base in kind.__mro__ if base.__module__ != nn.Module.__module__)
    methods = (value for base in own for value in vars(base).values())
    calls_forward = "forward" in getattr(getattr(kind.forward, "__code__", None), "co_names", ())
    inherited = (base for base in CALLS if isinstance(module, base) and (calls_forward or kind.forward is base.forward))
    found = {CALLS[base] for base in inherited}
    for method in methods:
        found |= _called(getattr(method, "__func__", method), depth=3)
    return found


def _called(function: Any, depth: int) -> set[str]:
    if not isinstance(function, FunctionType) or function.__module__.startswith("torch."):
        return set()
    codes = list(_codes(function.__code__))
    values = [function.__globals__.get(name) for code in codes for name in code.co_names]
    found = {name for code in codes for name in _taken_from_torch(code, function.__globals__)}
    found |= {f.__name__ for f in ROUTES for value in values if value is f}  # also under another name
    if depth:
        for value in values:
            found |= _called(value, depth - 1)
    return found


def _taken_from_torch(code: CodeType, known: dict[str, Any]) -> Iterator[str]:
    """Names of functional ops that are attributes of torch or torch.nn.functional, and not of a module's own."""
    for before, instruction in pairwise(dis.get_instructions(code)):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval in NAMES:
            owner = before.argval
            if owner == "functional" or (isinstance(owner, str) and known.get(owner) in (torch, F)):
                yield instruction.argval


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
