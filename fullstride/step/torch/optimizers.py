"""Requirements of a step on its optimizer, torch's or another."""

import inspect
from typing import Any

import torch

from fullstride.errors import ConfigError


def check_optimizer(optimizer: torch.optim.Optimizer, *, guarded: bool) -> None:
    """Check that a step can use an optimizer.

    Raises:
        ConfigError: for one that evaluates the loss itself, as L-BFGS does, by a closure: a step has done so once; and
            for a guard, for one that honours no skip flag on the device: it would ignore the flag silently.

    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} evaluates the loss itself, by a closure, which a step does not provide; "
            "expected an optimizer that steps by gradients, such as torch.optim.AdamW"
        )
    if guarded and not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ConfigError(
            f"guard: {type(optimizer).__name__} does not skip steps on the device, expected a fused optimizer, such as "
            "torch.optim.AdamW(..., fused=True)"
        )


def layers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and those that it wraps, the innermost last."""
    found = [optimizer]
    while inner := [x for x in vars(found[-1]).values() if isinstance(x, torch.optim.Optimizer) and x not in found]:
        found.append(inner[0])
    return found


def call_when_loaded(optimizer: torch.optim.Optimizer, act: Any) -> None:
    """Call `act` when the optimizer has loaded a state; a wrapper without hooks is followed to the optimizer it wraps.

    Raises:
        ConfigError: for an optimizer without hooks.

    """
    if not (hooked := [each for each in layers(optimizer) if hasattr(each, "_optimizer_load_state_dict_post_hooks")]):
        raise ConfigError(
            f"{type(optimizer).__name__} has no hooks of torch.optim.Optimizer, expected one whose __init__ calls "
            "torch.optim.Optimizer.__init__, or a wrapper around one"
        )
    hooked[-1].register_load_state_dict_post_hook(act)


def set_initial_rates(optimizer: torch.optim.Optimizer) -> None:
    """Store the first rate of each group as `initial_lr`, torch's own name of it; schedules are factors of it.

    Raises:
        ConfigError: for an optimizer that has no rate, as it finds its own.

    """
    for group in optimizer.param_groups:
        if group["lr"] is None:
            raise ConfigError(
                f"schedule: {type(optimizer).__name__} has lr=None and chooses its own rate, expected a number; "
                "leave schedule out, or set lr"
            )
        group.setdefault("initial_lr", float(group["lr"]))
