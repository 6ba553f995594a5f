"""Trial of a shared pass: on a copy of the network, with three samples, compared with the derivative of one alone."""

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fullstride.errors import one_line
from fullstride.meanflow.objective.derivative import (
    Conditions,
    Velocity,
    velocity_and_derivative,
    velocity_and_some_derivatives,
)
from fullstride.runs.atomic_files import note

# A wrong derivative is farther off; rounding in bf16 is not.
TOLERANCE = 2e-2
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What was found of each network, for each form of its inputs.
_found: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()


def can_share(model: Velocity, z: Tensor, r: Tensor, t: Tensor, v: Tensor, conditions: Conditions) -> bool:
    """Tell whether the network can share a pass, and note the answer once; neither it nor a random number is touched.

    Under `torch.compile` and during the capture of a CUDA graph nothing can be tried, so the answer is no.
    """
    if torch.compiler.is_compiling() or (z.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    if not isinstance(model, nn.Module):
        return False
    form = (z.shape[1:], z.dtype, z.device, model.training, tuple(conditions), torch.is_autocast_enabled(z.device.type))
    answers = _found.setdefault(model, {})
    if form not in answers:
        obstacle = _obstacle(model, z, r, t, v, conditions)
        if (not obstacle) not in answers.values():
            chosen = f"static, because {obstacle}" if obstacle else "shared, one pass for all samples"
            note(f"split=auto of {type(model).__name__}: {chosen}")
        answers[form] = not obstacle
    return answers[form]


def _obstacle(model: nn.Module, z: Tensor, r: Tensor, t: Tensor, v: Tensor, conditions: Conditions) -> str:
    """Why the network cannot share a pass; nothing if it can."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "several processes train it"
    if hasattr(model, "_orig_mod"):
        return "it is compiled already"
    if any(getattr(module, hooks, None) for module in model.modules() for hooks in HOOKS):
        return "it has hooks, and a trial would call them"
    pick = torch.tensor([0, len(z) - 1, 0], device=z.device)
    points = tuple(x.detach()[pick] for x in (z, r, t, v))
    given = {name: x.detach()[pick] if x.is_floating_point() else x[pick] for name, x in conditions.items()}
    devices = [z.device] if z.is_cuda else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            return _tried(copy.deepcopy(model), points, given)
    # A stranger's network may raise anything.
    except Exception as error:
        return one_line(error).split("; use loss.split=static")[0]


def _tried(net: nn.Module, points: tuple[Tensor, ...], given: Conditions) -> str:
    z, r, t, v = points
    r = torch.cat([r[:1], t[1:]])
    velocity_and_some_derivatives(net, z, r, t, v[:1], given)  # as it is, whose random numbers cannot be compared
    net.eval()
    found = velocity_and_some_derivatives(net, z, r, t, v[:1], given)
    _, derivative = velocity_and_derivative(net, z[:1], r[:1], t[:1], v[:1], {name: x[:1] for name, x in given.items()})
    for what, one, two in (("its output", found[0], net(z, r, t, **given)), ("du/dt", found[1], derivative)):
        if one.shape != two.shape or not (one - two).norm() <= TOLERANCE * two.norm():
            return f"{what} differs there"
    return ""
