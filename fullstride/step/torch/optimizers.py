"""Optimizers of a step, torch's or others: several as one, what a step requires of them, and their rates."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullstride.errors import ConfigError
from fullstride.step.torch.passes import ONE, passes_of
from fullstride.step.torch.schedules import Schedule


class Optimizers(torch.optim.Optimizer):
    """Several optimizers over disjoint parameters as one: their groups and state in order, and one step of each.

    Attributes:
        members: the optimizers.

    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]):  # not torch's, which would make state of its own
        """Take optimizers.

        Raises:
            ConfigError: for none, for a parameter that two of them have, and for one of several passes.

        """
        self.members = list(members)
        known: dict[int, str] = {}
        for each in self.members:
            name = type(each).__name__
            if (passes := passes_of(each)) != ONE:
                raise ConfigError(
                    f"{name} steps by {passes} and is one of {len(members)} optimizers, expected it alone"
                )
            own = {id(p): name for group in each.param_groups for p in group["params"]}
            if both := known.keys() & own.keys():
                raise ConfigError(
                    f"{known[min(both)]} and {name} share {len(both)} parameters, expected each in one optimizer"
                )
            known |= own
        if not self.members:
            raise ConfigError("an empty list of optimizers, expected at least one")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All groups, as they are now."""
        return [group for each in self.members for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state of each parameter, as it is now."""
        return {p: own for each in self.members for p, own in each.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Release the gradients of all."""
        for each in self.members:
            each.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step by each in order."""
        for each in self.members:
            each.step()


def as_one(given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return an optimizer, or several as one."""
    if not isinstance(given, Sequence):
        return given
    return given[0] if len(given) == 1 else Optimizers(given)


def members(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that step: several, or one alone."""
    return optimizer.members if isinstance(optimizer, Optimizers) else [optimizer]


def check_skips(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Check that an optimizer skips steps by a flag on the device; others would ignore the flag silently.

    Raises:
        ConfigError: if it does not, naming the setting `why`.

    """
    for each in members(optimizer):
        # Of itself: a wrapper that hands on the name of what it wraps does not hand on the flag.
        if not vars(each).get("_step_supports_amp_scaling", getattr(type(each), "_step_supports_amp_scaling", False)):
            raise ConfigError(
                f"{why}: {type(each).__name__} does not skip steps on the device, expected a fused optimizer, such as "
                "torch.optim.AdamW(..., fused=True)"
            )


def layers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and those that it wraps, the innermost last."""
    found = [optimizer]
    for each in found:  # which grows
        held = members(each) if isinstance(each, Optimizers) else vars(each).values()
        found += [x for x in held if isinstance(x, torch.optim.Optimizer) and x not in found]
    return found


def call_when_loaded(optimizer: torch.optim.Optimizer, act: Any) -> None:
    """Call `act` when the optimizer has loaded a state; a wrapper without hooks is followed to the optimizer it wraps.

    Raises:
        ConfigError: for an optimizer without hooks.

    """
    for one in members(optimizer):
        hooked = [each for each in layers(one) if hasattr(each, "_optimizer_load_state_dict_post_hooks")]
        if not hooked:
            raise ConfigError(
                f"{type(one).__name__} has no hooks of torch.optim.Optimizer, expected one whose __init__ calls "
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


def set_rates(optimizer: torch.optim.Optimizer, schedule: Schedule, made: Tensor) -> None:
    """Set each group's rate to its first one times the schedule's factor after `made` steps."""
    factor = schedule(made)
    for group in optimizer.param_groups:
        if "initial_lr" not in group:  # one that was added, or loaded from elsewhere
            set_initial_rates(optimizer)
        rate = group["initial_lr"] * factor
        if not isinstance(group["lr"], Tensor):
            group["lr"] = float(rate)
        elif rate.device == group["lr"].device:
            group["lr"].copy_(rate)
        else:
            group["lr"].fill_(float(rate))  # a copy from the host would wait for the device


def unscale(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Divide the gradients by the scale of the loss, and note whether one is not finite."""
    for each in members(optimizer):
        scaler.unscale_(each)


def scaled(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Step, unless a gradient is not finite, and then adapt the scale of the next loss."""
    for each in members(optimizer):
        scaler.step(each)
    scaler.update()
